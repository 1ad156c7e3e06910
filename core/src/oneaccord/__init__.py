"""Many hands make light work: collectives on NumPy arrays between processes, over a backend that the config chooses.

>>> import numpy as np
>>> import oneaccord as oa
>>> with oa.init() as group:
...     total = group.all_reduce(np.ones(3))

All but the errors is loaded when it is first used, so that a program that may or may not run distributed,
a command line or a test collection pays next to nothing for the import.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from oneaccord._version import __version__
from oneaccord.errors import (
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
    OneAccordError,
    OutOfMemoryError,
    PeerLostError,
    PluginError,
    ProtocolError,
    RaceError,
    RankError,
    RendezvousError,
    SelfSendError,
    SizeMismatchError,
    UnknownBackendError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from oneaccord.arrays.ops import Op, with_index
    from oneaccord.calls.post.messages import ANY, ANY_TAG
    from oneaccord.calls.post.status import Status
    from oneaccord.calls.work import Work, as_completed, wait_all, wait_any, wait_some
    from oneaccord.engines.launching import Job, launch, launch_async
    from oneaccord.engines.ranks import Ranks
    from oneaccord.group.elastic import ElasticState, elastic
    from oneaccord.group.group import Group
    from oneaccord.group.init import init
    from oneaccord.group.mesh import DeviceMesh
    from oneaccord.group.shared import SharedArray
    from oneaccord.group.window import Window
    from oneaccord.job.threads import outside, sleep
    from oneaccord.launchers.seat import Seat

__all__ = [
    "ANY",
    "ANY_TAG",
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
    "Job",
    "LayoutError",
    "OneAccordError",
    "Op",
    "OutOfMemoryError",
    "PeerLostError",
    "PluginError",
    "ProtocolError",
    "RaceError",
    "RankError",
    "Ranks",
    "RendezvousError",
    "Seat",
    "SelfSendError",
    "SharedArray",
    "SizeMismatchError",
    "Status",
    "UnknownBackendError",
    "UnsupportedError",
    "UsageError",
    "Window",
    "Work",
    "__version__",
    "as_completed",
    "elastic",
    "init",
    "launch",
    "launch_async",
    "outside",
    "sleep",
    "wait_all",
    "wait_any",
    "wait_some",
    "with_index",
]

_HOMES = {
    **dict.fromkeys(("ANY", "ANY_TAG"), "oneaccord.calls.post.messages"),
    "Status": "oneaccord.calls.post.status",
    "DeviceMesh": "oneaccord.group.mesh",
    "Group": "oneaccord.group.group",
    "Op": "oneaccord.arrays.ops",
    "Seat": "oneaccord.launchers.seat",
    "SharedArray": "oneaccord.group.shared",
    "Window": "oneaccord.group.window",
    "Work": "oneaccord.calls.work",
    **dict.fromkeys(("ElasticState", "elastic"), "oneaccord.group.elastic"),
    "as_completed": "oneaccord.calls.work",
    "init": "oneaccord.group.init",
    **dict.fromkeys(("Job", "launch", "launch_async"), "oneaccord.engines.launching"),
    "Ranks": "oneaccord.engines.ranks",
    "outside": "oneaccord.job.threads",
    "sleep": "oneaccord.job.threads",
    "wait_all": "oneaccord.calls.work",
    "wait_any": "oneaccord.calls.work",
    "wait_some": "oneaccord.calls.work",
    "with_index": "oneaccord.arrays.ops",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from oneaccord.common.aliases import missing_from_module

        raise AttributeError(missing_from_module(name), name=name, obj=sys.modules[__name__])
    from importlib import import_module

    if name in (
        "init",
        "elastic",
    ):  # its imports take a while, and a Ctrl-C then must have the same report as a later one
        from oneaccord.job.error_file import install

        install()
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
