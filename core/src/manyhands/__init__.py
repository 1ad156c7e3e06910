"""Many hands make light work: collectives on NumPy arrays between processes, over a backend that the config chooses.

>>> import numpy as np
>>> import manyhands as mh
>>> with mh.init() as group:
...     total = group.all_reduce(np.ones(3))
"""

from __future__ import annotations

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
    DTypeError,
    DuplicatePluginError,
    InternalError,
    InvalidRankError,
    InvalidWorldSizeError,
    LayoutError,
    ManyHandsError,
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
from manyhands.group import Group
from manyhands.joining import init

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
    "DuplicatePluginError",
    "Group",
    "InternalError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "LayoutError",
    "ManyHandsError",
    "PeerLostError",
    "PluginError",
    "ProtocolError",
    "RendezvousError",
    "SelfSendError",
    "SizeMismatchError",
    "UnknownBackendError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "init",
]
