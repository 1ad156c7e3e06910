"""Reading the variables of a launch, with an error in words for each value that cannot be."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from oneaccord.common.variables import Variable
from oneaccord.errors import ConfigError

__all__ = ["Variables", "derived_ports", "parse_address"]

_FIRST_DERIVED_PORT = 61440
"""The last 4096 ports: above the range from which Linux takes the ports of outgoing connections."""

_DERIVED_PORTS = 4096
_PLACES = 8
"""How many ports a job may use, so that it finds one beside other jobs whose numbers begin alike."""
_LARGEST_PORT = 65535
_MOST_DIGITS = 18

_OF_RANKS = re.compile(r"(?:PMI|PMIX|MPI|OMPI_COMM|MV2_COMM|PALS|JSM|FLUX|SLURM)_\w*(?:RANK|SIZE|FD|PORT|ID|NAMESPACE)\Z")
_PROXIES = (b"hydra", b"mpiexec", b"mpirun", b"orted", b"prte", b"pmi_proxy", b"slurmstepd")


def parse_address(text: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[IPv6 address]:port``.

    Parameters
    ----------
    text
        The address as a person writes it, such as ``node1:29500`` or ``[::1]:29500``.

    Returns
    -------
    tuple of str and int
        The host without brackets, and the port, 1 to 65535.

    Raises
    ------
    ConfigError
        The text is not of that form.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(
            f"{text!r} is not an address of the form host:port: an IPv6 address needs brackets, as in [::1]:29500", value=text
        )
    if not colon or not host or any(mark.isspace() or mark in "[]" for mark in host):
        raise ConfigError(f"{text!r} is not an address of the form host:port, such as node1:29500 or [::1]:29500", value=text)
    return host, _port(port, "the port of the address", text)


def derived_ports(job: str, taken: int | None = None) -> tuple[int, ...]:
    """Return the ports, 61440 to 65535, at which the ranks of the job named ``job`` meet: the first that no other program has. All ranks know them without messages.

    Two jobs may have the same ports, hence their names are compared when they meet. The port ``taken`` is left out.
    """
    digest = hashlib.sha512(os.fsencode(job)).digest()
    numbers = (int.from_bytes(digest[at : at + 2]) for at in range(0, len(digest), 2))
    ports = dict.fromkeys(_FIRST_DERIVED_PORT + number % _DERIVED_PORTS for number in numbers)
    return tuple(port for port in ports if port != taken)[:_PLACES]


class Variables:
    """The environment of one process.

    Parameters
    ----------
    environ
        The variables; one that is set to nothing counts as not set.
    parent
        The id of the launcher's process, alike for all ranks that it started on this host; None to find it.
    process
        The id of this process.
    """

    def __init__(self, environ: Mapping[str, str], parent: int | None, process: int) -> None:
        self._environ = environ
        self._parent = parent
        self.process: int = process

    def starter(self) -> str:
        """Return the id of the process that started the ranks of this host, by which a job without a name is known.

        That is the parent, or with a wrapper script around each rank one above it: the last process that has this rank's variables is the one
        that the launcher started.
        """
        if self._parent is None:
            own = _words_of_ranks((name, value) for name, value in self._environ.items())
            above = os.getppid()
            while above > 1 and own:
                words, grandparent = _ancestor(above)
                if words != own:
                    break
                above = grandparent
            self._parent = above
        return str(self._parent)

    def starter_name(self) -> str:
        """Return a name for what started the ranks of this host, which no other process has had: its id, and when it began."""
        number = self.starter()
        return f"process {'.'.join([number, *_begun(number)])}"

    def joined(self, first: str, *more: str) -> str:
        """Return the values of some variables, joined by dots; nothing if the first is not set."""
        return ".".join(value for name in (first, *more) if (value := self.text(name))) if self.text(first) else ""

    def text(self, *names: str) -> str | None:
        """Return the value of the first of ``names`` that is set, None when none is."""
        return next((value for name in names if (value := self._environ.get(name, "").strip())), None)

    def starting_with(self, prefix: str) -> str | None:
        """Return the value of the first variable, in alphabetical order, whose name starts with ``prefix``."""
        return self.text(*sorted(name for name in self._environ if name.startswith(prefix)))

    def integer(self, *names: str) -> int | None:
        """Return the first of ``names`` that is set as a number of 0 or more, None when none is set."""
        name = self._first(names)
        return None if name is None else self._number(name)

    def port(self, name: str) -> int | None:
        """Return the variable as a port, None when it is not set."""
        value = self.text(name)
        return None if value is None else _port(value, name, value, name)

    def address(self, name: str) -> tuple[str, int] | None:
        """Return the variable as a host and a port, None when it is not set."""
        value = self.text(name)
        if value is None:
            return None
        try:
            return parse_address(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}", file=name, value=value) from None

    def identity(self, rank_name: str, *size_names: str) -> tuple[int, int]:
        """Return the rank and the world size, each from its ONEACCORD variable if that is set.

        Raises
        ------
        ConfigError
            One of the two is not set, is no number, or the rank is not below the world size.
        """
        rank_from = self._first((Variable.RANK, rank_name))
        size_from = self._first((Variable.WORLD_SIZE, *size_names))
        if rank_from is None:
            raise self._half(size_from or size_names[0], rank_name, "this process's rank, counted from 0")
        if size_from is None:
            wanted = " or ".join(dict.fromkeys((*size_names, Variable.WORLD_SIZE)))
            raise self._half(rank_from, wanted, "the number of ranks")
        rank, size = self._number(rank_from), self._number(size_from)
        if size == 0:
            raise ConfigError(
                f"{size_from}=0: a world has at least one rank; set it to the number of ranks", file=size_from, value="0"
            )
        if rank >= size:
            raise ConfigError(
                f"{rank_from}={rank} and {size_from}={size}: ranks count from 0, so that the last one is {size - 1}; "
                f"correct {rank_from}, or set {size_from} to the number of ranks",
                file=rank_from,
                value=str(rank),
            )
        return rank, size

    def _first(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if self.text(name) is not None), None)

    def _number(self, name: str) -> int:
        value = self.text(name) or ""
        if not _is_number(value):
            raise ConfigError(
                f"{name}={value!r} is not a number of 0 or more; correct it, or unset it when this process was not started by "
                "the launcher that sets it",
                file=name,
                value=value,
            )
        return int(value)

    def _half(self, given: str, missing: str, meaning: str) -> ConfigError:
        value = self.text(given)
        return ConfigError(
            f"{given}={value} is set and {missing} is not: set {missing} to {meaning}, or unset {given} to run a world of one",
            file=missing,
            value=None,
        )


def _words_of_ranks(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the variables by which launchers show a process that it is one of several."""
    return {name: value for name, value in variables if _OF_RANKS.match(name)}


def _ancestor(process: int) -> tuple[dict[str, str], int]:
    """Return the variables of this kind with which a process began, and its parent; nothing if the system does not say, or if it is a launcher's proxy."""
    try:
        pairs = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        name, _, rest = Path(f"/proc/{process}/stat").read_bytes().partition(b"(")[2].rpartition(b")")
    except OSError:
        return {}, 0
    if name.startswith(_PROXIES):
        return {}, 0
    split = (os.fsdecode(pair).partition("=") for pair in pairs)
    return _words_of_ranks((each, value) for each, _, value in split), int(rest.split()[1])


def _begun(process: str) -> list[str]:
    """Return when a process began, in ticks since the system did; nothing if the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].decode().split()[19:20]
    except OSError:
        return []


def _is_number(text: str) -> bool:
    """Return whether this is a whole number of 64 bits; Python itself reads no text of thousands of digits."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _port(text: str, what: str, value: str, file: str | None = None) -> int:
    if _is_number(text) and 0 < int(text) <= _LARGEST_PORT:
        return int(text)
    shown = what if what == file else f"{what} {value!r}"
    raise ConfigError(f"{shown} must be a number from 1 to {_LARGEST_PORT}, not {text!r}", file=file, value=value)
