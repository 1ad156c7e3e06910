"""The messages between the ranks of a service, and the errors for a caller if a call failed."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from oneaccord.errors import OneAccordError, SizeMismatchError, UsageError
from oneaccord_parallel.rpc.errors import RemoteError

__all__ = [
    "CALL",
    "COUNT",
    "ERROR",
    "KEEP",
    "REF",
    "RELEASE",
    "RESULT",
    "Fault",
    "Faulty",
    "Request",
    "error_of",
    "faults",
    "pairs",
    "requests",
    "sound",
]

_CHARACTERS = 16_384

CALL, KEEP, RESULT, REF, ERROR, RELEASE, COUNT = range(1, 8)
"""The kinds of frames: a call whose result is wanted, or a reference to it; its result; references that are gone, and
one that is about to be."""


class Request(msgspec.Struct, array_like=True):
    """A call. ``refs`` are the arguments that are references: index or name, owner, number; None replaces them in the arguments."""

    function: str
    args: list[Any]
    kwargs: dict[str, Any]
    refs: list[tuple[int | str, int, int]]


class Packed(Request):
    """A call as it arrives, with arguments that wait to be decoded into their types."""

    args: list[msgspec.Raw]
    kwargs: dict[str, msgspec.Raw]


class Fault(msgspec.Struct, array_like=True):
    """A failure. ``kind`` is the class of error for the caller: "usage", "size" or "raised"; the rest describes the exception."""

    kind: str
    text: str
    function: str = ""
    cls: str = ""
    trace: str = ""


requests: msgspec.msgpack.Decoder[Packed] = msgspec.msgpack.Decoder(Packed)
faults: msgspec.msgpack.Decoder[Fault] = msgspec.msgpack.Decoder(Fault)
pairs: msgspec.msgpack.Decoder[tuple[int, int]] = msgspec.msgpack.Decoder(tuple[int, int])


class Faulty(Exception):
    """A call went wrong, as ``fault`` says."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault: Fault = fault

    @classmethod
    def raised(cls, error: BaseException, function: str, rank: int) -> Faulty:
        """Return the report of a function's exception for the caller; the traceback begins in the function."""
        trace = error.__traceback__
        lines = traceback.format_exception(error.with_traceback(trace.tb_next if trace is not None else None))
        text = f"{function!r} on rank {rank} raised {type(error).__name__}: {_words(error)}"
        return cls(
            Fault("raised", sound(text[:_CHARACTERS]), function, type(error).__name__, sound("".join(lines)[-_CHARACTERS:]))
        )


def error_of(fault: Fault, peer: int) -> OneAccordError:
    """Return the error that a caller gets."""
    if fault.kind == "size":
        return SizeMismatchError(fault.text, peer=peer)
    if fault.kind == "usage":
        return UsageError(fault.text, peer=peer)
    text = f"{fault.text}\n--- the traceback on rank {peer} ---\n{fault.trace}"
    return RemoteError(text, peer=peer, function=fault.function, kind=fault.cls, traceback=fault.trace)


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - the class says enough
        return "(its words cannot be shown)"


def sound(text: str) -> str:
    """Return a text that can be encoded."""
    return text.encode("utf-8", "replace").decode()
