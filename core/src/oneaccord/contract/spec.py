"""The description of a plugin's backend, and the requests that core makes besides messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from oneaccord.schedule.steps import Collective

__all__ = ["API_VERSION", "BackendSpec", "CollectiveRequest", "LaunchRequest", "NoConfig"]

API_VERSION: int = 1
"""The version of the contract between core and plugins. Core takes plugins of this version and of the one before, and refuses others."""


@dataclass(frozen=True)
class NoConfig:
    """The config of a backend of which nothing can be set."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The request of ``oneaccord run``, for a backend that starts its ranks itself.

    Attributes
    ----------
    target
        A script's path, or a module's name.
    is_module
        Whether it is a module.
    args
        The arguments of the script.
    ranks
        How many ranks to start.
    backend
        The name of the backend.
    environ
        Variables to set for each rank: the chosen config, above all.
    prefix
        Whether each line of output begins with its rank.
    config
        The backend's own config, an instance of `BackendSpec.config`.
    """

    target: str
    is_module: bool
    args: tuple[str, ...]
    ranks: int
    backend: str
    environ: dict[str, str] = field(default_factory=dict)
    prefix: bool = True
    config: Any = None


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """The description of a backend; cheap to make, so that a plugin's module stays light.

    A wrong field is a `PluginError` for a caller that needs the backend, and a sentence in ``oneaccord doctor``.

    Attributes
    ----------
    name
        The name in the config, equal to that of the entry point.
    summary
        One line, for ``oneaccord doctor``.
    factory
        ``"module:function"``; the function takes a `Bootstrap` and returns a `Backend`. It is imported when the backend is used, and called
        in a thread of its own, which is left behind if it has not returned two seconds after the deadline of `init`.
    config
        The model of ``[backends.NAME]``: a subclass of `BackendConfig`, a pydantic model, or ``"module:class"``, which is imported when
        the backend is used or has a table. Unknown keys are errors. A frozen dataclass does as well: the metadata of its fields is
        arguments of `pydantic.Field`, such as ``description`` and ``ge``.
    devices
        The memory that arrays may be in: ``"cpu"``, ``"cuda"``, or both.
    capabilities
        Words for which a user may select: ``"transport"``; ``"native"`` if it offers native collectives; ``"virtual time"`` if
        ranks do not run by the computer's clock; ``"calling thread"`` if the factory must run in the thread that calls `init`,
        as that of MPI. A factory that hangs there hangs the program.
    probe
        Returns None when the backend can run here, otherwise the reason in words. It must be quick and import nothing heavy; after
        ten seconds it is left behind, and the backend counts as one that cannot run. Called in a thread of its own, any number of times.
    install
        The command that helps if it cannot.
    auto_priority
        With ``backend = "auto"``, the highest number wins among the backends that can run. A backend with None is never chosen, and
        one with ``parts`` only if there are several hosts, one of them with several ranks.
    one_host
        Whether all ranks must be on one host. If they are not, ``auto`` passes it over.
    selection
        ``"package:file"``: a table of algorithms that fits this backend, in the package's folder. The config's ``selection`` is
        read first, then this table, then the default table.
    diagnose
        ``"module:function"`` returning facts for ``oneaccord doctor``, as (what, value) pairs: versions, devices, links. It may import what the
        backend needs, and says in words which parts are missing. After a minute it is left behind.
    parts
        For a backend that is composed of others: a function that takes its config, and maps each key that names a backend to
        that name, such as ``{"routes.cpu": "tcp"}``. Missing backends are reported before any rank starts.
    checksum
        Whether it seals its messages as `Bootstrap.seals` asks, or sends none out of this host. Others are refused with ``security.checksum``.
    tls
        Whether it sends to other hosts only over connections of `Bootstrap.dial` and `Bootstrap.listen`, by methods of theirs that
        encrypt: ``send``, ``sendmsg``, ``recv``, ``recv_into``, ``recvmsg_into``. Others are refused with ``security.tls``.
    launcher
        ``"module:function"`` taking a `LaunchRequest` and returning an exit code, for a backend whose ranks are not
        processes started by ``oneaccord run``.
    api_version
        The version of the contract that the plugin was built for, written as a number: not `API_VERSION`, which is that of the
        oneaccord-core that happens to be installed.
    """

    name: str
    summary: str
    factory: str
    config: type[object] | str = NoConfig
    devices: tuple[str, ...] = ("cpu",)
    capabilities: frozenset[str] = frozenset({"transport"})
    probe: Callable[[], str | None] = lambda: None
    install: str = ""
    auto_priority: int | None = None
    one_host: bool = False
    selection: str | None = None
    diagnose: str | None = None
    parts: Callable[[Any], Mapping[str, str]] | None = None
    checksum: bool = False
    tls: bool = False
    launcher: str | None = None
    api_version: int = 1  # not API_VERSION: a plugin built for an old contract must not claim the present one


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """A kind of call, put to ``oneaccord_collective`` once and remembered.

    Attributes
    ----------
    backend
        The name of the backend.
    collective
        Which collective.
    device
        The memory of the arrays, such as ``"cpu"``.
    dtype
        Their dtype, which may be structured; None for a barrier.
    op
        The name of the reduction, which may be ``"mean"``; ``"Op(...)"`` for a user's function. None if there is none.
    nbytes
        The size of this rank's array in bytes.
    world_size
        How many ranks take part.
    even
        Whether the blocks of all ranks are of one size.
    digest
        Eight bytes that differ between ranks that do not make the same call.
    """

    backend: str
    collective: Collective
    device: str
    dtype: np.dtype[np.generic] | None
    op: str | None
    nbytes: int
    world_size: int
    even: bool = True
    digest: bytes = b""
