"""Every error that oneaccord raises, as one tree.

::

    OneAccordError
    ├─ UsageError (ValueError)            found before any byte moves
    │   ├─ InvalidRankError               a rank, root, peer or source outside the world
    │   ├─ InvalidWorldSizeError          an impossible world size
    │   ├─ SizeMismatchError              an array or a list of counts of the wrong size
    │   ├─ DTypeError                     a dtype that cannot travel, or an op that it does not have
    │   ├─ LayoutError                    memory that cannot be written, or cannot be handled without permuting it
    │   ├─ SelfSendError                  a rank sends to itself
    │   └─ ConfigError                    a configuration file, variable or argument
    ├─ PluginError
    │   ├─ UnknownBackendError (ConfigError)       no installed backend has that name
    │   ├─ BackendUnavailableError (ImportError)   installed, but it cannot run here
    │   ├─ DuplicatePluginError           two plugins register one name
    │   └─ ApiVersionError                a plugin built for another version of the contract
    ├─ UnsupportedError (NotImplementedError)      not possible with this backend, device, dtype or reduction
    ├─ OutOfMemoryError (MemoryError)     no memory for a call
    ├─ RankError (RuntimeError)           a rank of launch() ended with nothing that can be returned or raised
    ├─ CommError                          found while ranks communicate
    │   ├─ RendezvousError (ConnectionError)       the ranks did not meet
    │   │   └─ AuthenticationError                 a process does not hold the job's secret
    │   ├─ PeerLostError (ConnectionError)         a rank died or left
    │   ├─ DeadlineError (TimeoutError)            an operation did not finish in time
    │   ├─ CollectiveMismatchError                 the ranks did not make the same call
    │   │   └─ DeadlockError                       ranks wait for each other, and none can continue
    │   ├─ AbortedError                            another rank gave up
    │   ├─ InputChangedError                       a program wrote to an array that a call was still to read
    │   ├─ RaceError                               ranks used the same elements of a window without an order
    │   ├─ ClosedError                             the group was closed
    │   └─ ProtocolError                           a peer sent bytes that no oneaccord sends
    └─ InternalError                      a bug in oneaccord

Each carries ``rank`` (the one that raised it), ``peer`` (the one that it is about), ``operation`` and ``sequence`` if they are
known, and survives pickling. An error inherits the builtin that a caller would expect to catch.
"""

from __future__ import annotations

import re
from typing import Any, Final

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
    "DuplicatePluginError",
    "GpuFallbackWarning",
    "InputChangedError",
    "InternalError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "LayoutError",
    "OneAccordError",
    "OutOfMemoryError",
    "PeerLostError",
    "PluginError",
    "ProtocolError",
    "RaceError",
    "RankError",
    "RendezvousError",
    "SelfSendError",
    "SizeMismatchError",
    "UnknownBackendError",
    "UnsupportedError",
    "UsageError",
]


_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text so that it can be shown: a terminal would obey the control characters that others have put into it.

    Newlines and tabs stay. Other control characters, those that turn the direction of writing, and halves of surrogate pairs become
    ``\x1b`` and the like, and beyond ASCII ``\u009b``, which TOML and JSON have as well.
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}" if found[0].isascii() else f"\\u{ord(found[0]):04x}", text)


class OneAccordError(Exception):
    """The root of every error that oneaccord raises.

    Parameters
    ----------
    message
        The given value, the expected one, and the remedy.
    rank
        The rank that raises the error.
    peer
        The rank that the error is about: the one that died, lagged or differed.
    operation
        The call that the error ended on this rank, such as ``"all_reduce"`` or ``"recv from rank 2"``, or during which it was
        found.
    sequence
        The number of that call, counted from 0 among the collectives of its group, or among this rank's own messages.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        operation: str | None = None,
        sequence: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message: str = message
        self.rank: int | None = rank
        self.peer: int | None = peer
        self.operation: str | None = operation
        self.sequence: int | None = sequence

    def __str__(self) -> str:
        return printable(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.message, dict(self.__dict__))


def _restore(cls: type[OneAccordError], message: str, attributes: dict[str, Any]) -> OneAccordError:
    """Rebuild a pickled error, with the fields of its subclass."""
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(attributes)
    return error


class UsageError(OneAccordError, ValueError):
    """The call is impossible. This is found before any byte moves, so the group stays usable."""


class InvalidRankError(UsageError):
    """A rank, root, peer or source that is not in the group."""


class InvalidWorldSizeError(UsageError):
    """A world size that is not a positive integer or does not fit the launch."""


class SizeMismatchError(UsageError):
    """An array, an ``out=`` or a list of counts whose size does not fit the call."""


class DTypeError(UsageError):
    """A dtype that cannot travel, or an ``op`` that the dtype does not have."""


class LayoutError(UsageError):
    """Memory that cannot be used as asked: read-only, overlapping, or not an array at all."""


class SelfSendError(UsageError):
    """A rank tried to send to itself or to receive from itself."""


class ConfigError(UsageError):
    """A value of the configuration is wrong.

    Parameters
    ----------
    file
        The origin of the value: a path, an environment variable or ``"argument"``.
    key
        The dotted key, such as ``"backends.tcp.interface"``.
    value
        The given value.
    """

    def __init__(self, message: str, *, file: str | None = None, key: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.file: str | None = file
        self.key: str | None = key
        self.value: object = value


class PluginError(OneAccordError):
    """Something is wrong with a plugin or with the choice of one."""


class UnknownBackendError(PluginError, ConfigError):
    """No installed plugin provides a backend of that name; if the name was configured, ``file`` and ``key`` say where."""


class BackendUnavailableError(PluginError, ImportError):
    """The backend is installed, but cannot run here; the message says why, and what to type."""


class DuplicatePluginError(PluginError):
    """Two installed distributions provide a backend of one name."""


class ApiVersionError(PluginError):
    """A plugin was built for another version of the plugin contract."""


class UnsupportedError(OneAccordError, NotImplementedError):
    """The backend, device, dtype or reduction cannot do what was asked; the message says what can."""


class OutOfMemoryError(OneAccordError, MemoryError):
    """There is no memory for the result of a call, or for a copy on the way.

    If nothing had been sent yet, the group can still be used. In the middle of a call the job ends: the other ranks get an
    `AbortedError` that names this one.
    """


class RankError(OneAccordError, RuntimeError):
    """A rank that `oneaccord.launch` or `oneaccord.Ranks` started ended with nothing that can be returned or raised; ``rank`` names it.

    It was killed, or it left by ``sys.exit()``, or its result or its exception cannot be pickled.
    """


class CommError(OneAccordError):
    """Communication failed; the group is revoked, and each later call on it raises the same first cause."""


class RendezvousError(CommError, ConnectionError):
    """The ranks of a job did not meet."""


class AuthenticationError(RendezvousError):
    """The other side does not hold this job's secret, or no certificate that is trusted."""


class PeerLostError(CommError, ConnectionError):
    """A rank died, or was cut off; ``peer`` names it."""


class DeadlineError(CommError, TimeoutError):
    """An operation did not finish in time; the message says which ranks were not there."""


class CollectiveMismatchError(CommError):
    """The ranks did not make the same call; the message names the ranks and their calls."""


class DeadlockError(CollectiveMismatchError):
    """Ranks wait for each other, and none of them can continue; the message says where each of them is."""


class AbortedError(CommError):
    """Another rank gave up, usually because its program raised; ``peer`` names it."""


class InputChangedError(CommError):
    """The program of a rank, ``peer``, wrote to an array before a call in the background had read it."""


class RaceError(CommError):
    """Two ranks used the same elements of a window without an order between them, and one of them changed them; ``peer`` is the later one."""


class ClosedError(CommError):
    """The group was closed."""


class ProtocolError(CommError):
    """A peer sent bytes that oneaccord never sends."""


class InternalError(OneAccordError):
    """A bug in oneaccord; please report it with the message."""


class GpuFallbackWarning(UserWarning):
    """An array on a GPU goes through host memory, as ``gpu_fallback = "host"`` allows. Each operation of a group warns once."""
