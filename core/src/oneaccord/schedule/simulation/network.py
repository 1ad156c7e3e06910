"""A network: its levels of links, how they are connected, and how ranks are placed on it; read from TOML files, or known by name."""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from oneaccord.common.checks import UNREADABLE
from oneaccord.errors import ConfigError
from oneaccord.schedule.simulation.jitter import Jitter

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["PRESETS", "Level", "Network"]


def _no_bool(value: Any) -> Any:
    """Refuse true and false, which pydantic would take for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Seconds = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, BeforeValidator(_no_bool), Field(gt=0)]
Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]


class _Model(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class Level(_Model):
    """One kind of link.

    Attributes
    ----------
    latency_s
        Seconds that the first byte of a message takes over the link.
    bandwidth_bytes_per_s
        Bytes per second in each direction; ``inf`` is allowed.
    gap_s
        Seconds for which a message occupies the link besides its bytes, LogGP's gap. By default the latency: then two messages
        in a row take twice the time of one, as in Hockney's model.
    """

    latency_s: Seconds = Field(description="Seconds that the first byte of a message takes over the link.")
    bandwidth_bytes_per_s: Rate = Field(description="Bytes per second in each direction.")
    gap_s: Seconds | None = Field(default=None, description="Seconds that a message occupies the link besides its bytes.")

    @property
    def gap(self) -> float:
        """``gap_s``, or its substitute if it is not given."""
        return self.latency_s if self.gap_s is None else self.gap_s


# The tables and numbers that each topology needs, and those that it may have besides.
_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "wires": ("wire",),
    "bus": ("host", "bus"),
    "fat_tree": ("host", "nic", "spine", "hosts_per_leaf", "oversubscription"),
    "torus": ("host", "link"),
}
_MAY_HAVE: Final[dict[str, tuple[str, ...]]] = {"wires": ("host",), "torus": ("dimensions",)}


class Network(_Model):
    """A network and the ranks on it; rank r lives on host ``r // ranks_per_host``.

    Attributes
    ----------
    topology
        ``"wires"``: each pair of ranks has its own wires, so that messages never share one. ``"bus"``: all ranks on one host,
        whose memory they share. ``"fat_tree"``: the ranks of a host share its network card, hosts hang at leaf switches, and these at
        spine switches. ``"torus"``: hosts in three dimensions, each linked to its six neighbours.
    summary
        One line for messages and tables.
    ranks_per_host
        How many neighbouring ranks share a host.
    reduction_bytes_per_s
        Bytes of a result that one rank computes per second; ``inf`` if a reduction is free.
    host
        Between two ranks of one host. Every pair has its own.
    wire
        ``wires``: between two ranks of different hosts, and also of one host if ``host`` is left out.
    bus
        ``bus``: shared by all messages, in addition to the links of each pair.
    nic, spine
        ``fat_tree``: between a host and its leaf switch, and between a leaf and a spine switch; one in each direction.
    hosts_per_leaf, oversubscription
        ``fat_tree``: a leaf switch has ``hosts_per_leaf`` hosts below it and ``hosts_per_leaf / oversubscription`` spine switches
        above.
    link
        ``torus``: between two neighbouring hosts; one in each direction.
    dimensions
        ``torus``: hosts along x, y and z; by default as near to a cube as the number of hosts allows.
    jitter
        Random delays of messages; by default there are none. Only programs that run message by message know of it.
    """

    topology: Literal["wires", "bus", "fat_tree", "torus"] = Field(description="How the links are put together.")
    summary: str = Field(default="", description="One line for people.")
    ranks_per_host: Count = Field(default=1, description="How many neighbouring ranks share a host.")
    reduction_bytes_per_s: Rate = Field(default=math.inf, description="Bytes that a rank reduces per second.")
    host: Level | None = Field(default=None, description="Between two ranks of one host.")
    wire: Level | None = Field(default=None, description="wires: between two ranks of different hosts.")
    bus: Level | None = Field(default=None, description="bus: what all messages of the host share.")
    nic: Level | None = Field(default=None, description="fat_tree: between a host and its leaf switch.")
    spine: Level | None = Field(default=None, description="fat_tree: between a leaf and a spine switch.")
    hosts_per_leaf: Count | None = Field(default=None, description="fat_tree: the hosts below a leaf switch.")
    oversubscription: Count | None = Field(default=None, description="fat_tree: hosts below a leaf for each spine above it.")
    link: Level | None = Field(default=None, description="torus: between two neighbouring hosts.")
    dimensions: tuple[Count, Count, Count] | None = Field(default=None, description="torus: hosts along x, y and z.")
    jitter: Jitter | None = Field(default=None, description="By how much messages are late, by chance.")

    @model_validator(mode="after")
    def _check_parts(self) -> Network:
        needed, allowed = _NEEDS[self.topology], _MAY_HAVE.get(self.topology, ())
        parts = {part for parts in (*_NEEDS.values(), *_MAY_HAVE.values()) for part in parts}
        for part in sorted(parts):
            given = getattr(self, part) is not None
            if part in needed and not given:
                raise ValueError(f"{part} is missing; the topology {self.topology!r} needs {', '.join(needed)}")
            if given and part not in needed and part not in allowed:
                raise ValueError(
                    f"{part} cannot be set with the topology {self.topology!r}, which has {', '.join((*needed, *allowed))}"
                )
        if self.hosts_per_leaf and self.oversubscription and self.hosts_per_leaf % self.oversubscription:
            raise ValueError(
                f"hosts_per_leaf is {self.hosts_per_leaf} and oversubscription {self.oversubscription}; "
                "expected an oversubscription that divides hosts_per_leaf"
            )
        if self.topology == "bus" and self.jitter is not None and self.jitter.links == "between hosts":
            raise ValueError(
                "jitter.links = 'between hosts' cannot be used with the topology 'bus', which has one host; expected 'all'"
            )
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Network:
        """Read a network from a TOML file.

        Parameters
        ----------
        path
            The file.

        Raises
        ------
        ConfigError
            The file cannot be read, is not TOML, or does not describe a network; ``file``, ``key`` and ``value`` name the first fault.
        """
        file = str(path)
        if Path(path).exists() and not Path(path).is_file():
            raise ConfigError(f"{file}: the network file is not a regular file: give a TOML file", file=file)
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file}: the network file is not valid TOML: {error}", file=file) from None
        except (OSError, *UNREADABLE) as error:
            raise ConfigError(f"{file}: the network file cannot be read: {error}", file=file) from None
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            raise _as_error(error, file) from None

    @classmethod
    def resolve(cls, value: str | os.PathLike[str] | Network | None) -> Network | None:
        """Return the network that is meant.

        Parameters
        ----------
        value
            The name of a preset, the path of a TOML file, a network, which is returned as it is, or None, which stays None.

        Raises
        ------
        ConfigError
            There is neither a preset nor a file of that name, or the file describes no network.
        """
        if value is None or isinstance(value, Network):
            return value
        if not isinstance(value, str):
            return cls.load(value)
        if value in PRESETS:
            return PRESETS[value]
        if Path(value).exists():
            return cls.load(value)
        near = difflib.get_close_matches(value.lower(), PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(
            f"network = {value!r}: this is neither a preset nor a file{hint} Presets are: {', '.join(PRESETS)}",
            key="network",
            value=value,
        )

    def with_ranks_per_host(self, ranks_per_host: int) -> Network:
        """Return this network with another number of ranks on each host.

        Parameters
        ----------
        ranks_per_host
            How many.

        Raises
        ------
        ConfigError
            The number is below 1.
        """
        if ranks_per_host < 1:
            raise ConfigError(
                f"ranks_per_host is {ranks_per_host}; expected 1 or more",
                file="argument",
                key="ranks_per_host",
                value=ranks_per_host,
            )
        return self.model_copy(update={"ranks_per_host": ranks_per_host})

    def neighbours(self, size: int) -> int:
        """Return the number of ranks that share a host; on a bus, that is all of them.

        Parameters
        ----------
        size
            How many ranks there are.
        """
        return size if self.topology == "bus" else self.ranks_per_host


def _as_error(error: ValidationError, file: str) -> ConfigError:
    """Put what pydantic found into words, one line for each problem."""
    lines, places = [], []
    for detail in error.errors(include_url=False):
        key = ".".join(str(part) for part in detail["loc"])
        value = detail["input"]
        places.append((key, value))
        if detail["type"] == "missing":
            lines.append(f"{file}: {key} is missing, and it has no default")
        elif not key:
            lines.append(f"{file}: {_words(detail)}")
        else:
            lines.append(f"{file}: {key} = {value!r}: {_words(detail)}")
    key, value = places[0]
    return ConfigError("\n".join(lines), file=file, key=key or None, value=value)


def _words(detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        model: type[BaseModel] = Network
        if len(detail["loc"]) > 1:
            model = Jitter if detail["loc"][0] == "jitter" else Level
        return f"this key is unknown. Valid here: {', '.join(model.model_fields)}"
    return detail["msg"].removeprefix("Value error, ").replace("Input should", "it should")


# Networks by name: the textbook's, and three that resemble what people have.

_US: Final[float] = 1e-6
_GB: Final[float] = 1e9

# A GPU adds two arrays in memory at about 3 TB/s of traffic (H100: 3.35 TB/s, data sheet), three bytes moved for one of the result.
_GPU_REDUCTION: Final[float] = 1000 * _GB

# NVLink 4 with NVSwitch: 450 GB/s in each direction per GPU (data sheet). NCCL's point-to-point latency over it is 1 to 2 us; the
# launch of the next transfer takes about half of that.
_NVLINK: Final[Level] = Level(latency_s=1.5 * _US, bandwidth_bytes_per_s=450 * _GB, gap_s=0.7 * _US)

PRESETS: Final[dict[str, Network]] = {
    # The numbers are round on purpose: 1 us and 10 GB/s make a result easy to check by hand. A core adds float32 arrays that do not
    # fit its cache at a few GB/s; without a cost of reduction, formulas stay those that books print first.
    "textbook": Network(
        topology="wires",
        summary="every pair has its own wires; 1 us, 10 GB/s, free reductions; one send and one receive of a rank at a time",
        wire=Level(latency_s=1 * _US, bandwidth_bytes_per_s=10 * _GB),
    ),
    # Eight GPUs behind one 400 Gbit/s card (50 GB/s). InfiniBand's end-to-end latency is about 1.2 us with one switch between
    # (NDR adapters 0.5 to 0.6 us at each end), and a further switch adds 0.13 to 0.2 us with its cable. A core gives a card one
    # message in about 0.1 us. 16 hosts and 8 spines per leaf: the 2:1 of many clusters.
    "fat-tree": Network(
        topology="fat_tree",
        summary="8 ranks per host behind one 400 Gbit/s card, 16 hosts per leaf switch, oversubscribed 2:1 towards the spines",
        ranks_per_host=8,
        reduction_bytes_per_s=_GPU_REDUCTION,
        host=_NVLINK,
        nic=Level(latency_s=0.6 * _US, bandwidth_bytes_per_s=50 * _GB, gap_s=0.1 * _US),
        spine=Level(latency_s=0.2 * _US, bandwidth_bytes_per_s=50 * _GB, gap_s=0.02 * _US),
        hosts_per_leaf=16,
        oversubscription=2,
    ),
    # As TPU pods and Fugaku's Tofu D have it, with 50 GB/s per link and direction (a TPU v4 link: 50 GB/s; Jouppi et al., 2023).
    # Tofu D's put takes 0.49 us to a neighbour, and about 0.1 us for each hop more (Ajima et al., 2018); 0.3 us is between them.
    "torus": Network(
        topology="torus",
        summary="8 ranks per host, hosts in a 3-D torus with 50 GB/s to each of six neighbours, routed along x, y, then z",
        ranks_per_host=8,
        reduction_bytes_per_s=_GPU_REDUCTION,
        host=_NVLINK,
        link=Level(latency_s=0.3 * _US, bandwidth_bytes_per_s=50 * _GB, gap_s=0.05 * _US),
    ),
    # One loopback connection moves 3 to 5 GB/s and takes 15 to 30 us from one Python process to another; two channels of DDR4 or
    # DDR5 carry 40 to 60 GB/s, and each byte crosses memory about four times on its way through the kernel. NumPy adds float32
    # arrays that come from memory at about 4 GB/s of the result.
    "laptop": Network(
        topology="bus",
        summary="one host: 4 GB/s and 20 us over loopback for each pair, 12 GB/s of memory bandwidth for all together",
        reduction_bytes_per_s=4 * _GB,
        host=Level(latency_s=20 * _US, bandwidth_bytes_per_s=4 * _GB),
        bus=Level(latency_s=0, bandwidth_bytes_per_s=12 * _GB),
    ),
}
"""Networks that ``--network`` knows by name."""
