"""Many hands make light work: collectives on NumPy arrays between processes, over a backend that the config chooses.

>>> import numpy as np
>>> import manyhands as mh
>>> with mh.init() as group:
...     total = group.all_reduce(np.ones(3))

All but the errors is loaded when it is first used, so that a program that may or may not run distributed,
a command line or a test collection pays next to nothing for the import.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from manyhands._version import __version__
from manyhands.errors import (
    AbortedError,
    ApiVersionError,
    AuthenticationError,
    BackendUnavailableError,
    ClosedError,
    CollectiveMismatchError,
    CommError,
    ConfigError,
    DeadlineError,
    DeadlockError,
    DTypeError,
    DuplicatePluginError,
    GpuFallbackWarning,
    InputChangedError,
    InternalError,
    InvalidRankError,
    InvalidWorldSizeError,
    LayoutError,
    ManyHandsError,
    OutOfMemoryError,
    PeerLostError,
    PluginError,
    ProtocolError,
    RendezvousError,
    SelfSendError,
    SizeMismatchError,
    UnknownBackendError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from manyhands.arrays.ops import Op, with_index
    from manyhands.calls.work import Work, as_completed, wait_all, wait_any
    from manyhands.group.elastic import ElasticState, elastic
    from manyhands.group.group import Group
    from manyhands.group.init import init
    from manyhands.group.mesh import DeviceMesh
    from manyhands.job.threads import outside, sleep

__all__ = [
    "AbortedError",
    "ApiVersionError",
    "AuthenticationError",
    "BackendUnavailableError",
    "ClosedError",
    "CollectiveMismatchError",
    "CommError",
    "ConfigError",
    "DTypeError",
    "DeadlineError",
    "DeadlockError",
    "DeviceMesh",
    "DuplicatePluginError",
    "ElasticState",
    "GpuFallbackWarning",
    "Group",
    "InputChangedError",
    "InternalError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "LayoutError",
    "ManyHandsError",
    "Op",
    "OutOfMemoryError",
    "PeerLostError",
    "PluginError",
    "ProtocolError",
    "RendezvousError",
    "SelfSendError",
    "SizeMismatchError",
    "UnknownBackendError",
    "UnsupportedError",
    "UsageError",
    "Work",
    "__version__",
    "as_completed",
    "elastic",
    "init",
    "outside",
    "sleep",
    "wait_all",
    "wait_any",
    "with_index",
]

_HOMES = {
    "DeviceMesh": "manyhands.group.mesh",
    "Group": "manyhands.group.group",
    "Op": "manyhands.arrays.ops",
    "Work": "manyhands.calls.work",
    **dict.fromkeys(("ElasticState", "elastic"), "manyhands.group.elastic"),
    "as_completed": "manyhands.calls.work",
    "init": "manyhands.group.init",
    "outside": "manyhands.job.threads",
    "sleep": "manyhands.job.threads",
    "wait_all": "manyhands.calls.work",
    "wait_any": "manyhands.calls.work",
    "with_index": "manyhands.arrays.ops",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from manyhands.common.aliases import missing_from_module

        raise AttributeError(missing_from_module(name), name=name, obj=sys.modules[__name__])
    from importlib import import_module

    if name in (
        "init",
        "elastic",
    ):  # its imports take a while, and a Ctrl-C then must have the same report as a later one
        from manyhands.job.error_file import install

        install()
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
