"""One message with a tag: as its sender sees it, as it arrives, and as its receiver does."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Literal, Protocol

import numpy as np

from oneaccord.arrays.memory import Array, bytes_of, new_array
from oneaccord.calls.post.envelopes import NO_RANK, NO_TAG, OBJECT, Envelope, opened
from oneaccord.errors import DTypeError, OneAccordError, OutOfMemoryError, SizeMismatchError

__all__ = [
    "ANY",
    "ANY_TAG",
    "BYTE",
    "AnyRank",
    "AnyTag",
    "Letter",
    "Operation",
    "Receive",
    "Send",
    "Wildcard",
    "Words",
    "words_of",
]

BYTE: Final = np.dtype(np.uint8)


class Wildcard(Enum):
    """Stands for any rank, or for any tag."""

    RANK = "ANY"
    TAG = "ANY_TAG"

    def __repr__(self) -> str:
        return f"oneaccord.{self.value}"


ANY: Final = Wildcard.RANK
"""As ``source=``: whichever rank's message comes first."""
ANY_TAG: Final = Wildcard.TAG
"""As ``tag=``: a message with any tag."""
AnyRank = Literal[Wildcard.RANK]
AnyTag = Literal[Wildcard.TAG]


class Words:
    """A call in words, which are made only on demand."""

    __slots__ = ("_call", "_rank", "_tag", "_towards")

    def __init__(self, call: str, towards: str, rank: int, tag: int) -> None:
        self._call = call
        self._towards = towards
        self._rank = rank
        self._tag = tag

    def __str__(self) -> str:
        rank = "any rank" if self._rank == NO_RANK else f"rank {self._rank}"
        tag = "any tag" if self._tag == NO_TAG else f"tag {self._tag}"
        return f"{self._call} {self._towards} {rank}, {tag}"


words_of: Callable[[str, str, int, int], Words] = lru_cache(maxsize=4096)(Words)


class Handle(Protocol):
    """What the caller has of an operation."""

    @property
    def calls_back(self) -> bool:
        """Whether its end calls a function of the program."""

    def end(self) -> None:
        """Take note that an operation of it has ended."""


class Owner(Protocol):
    """The group of an operation."""

    def failure(self, operation: Operation, error: BaseException) -> BaseException:
        """Return the error of an operation that ends with an exception of the office."""


class Operation:
    """A send or a receive on its way.

    Attributes
    ----------
    what
        The call in words: an object that makes them on demand.
    done
        Whether it has ended, well or badly.
    error
        Why it ended badly.
    has_begun
        Whether it has begun on the short way.
    request
        The handle that the caller has of it; None if the caller waits.
    context
        The number of its group.
    path
        The path of its group.
    kept_by
        The operations for which the office drives although no thread may wait; None if this is none of them.
    limits
        Until when it may last, and how many seconds in all, if no thread need wait for it.
    """

    # Most calls leave these as they are, and begin and end within a microsecond or two.
    done: bool = False
    error: BaseException | None = None
    has_begun: bool = False
    request: Handle | None = None
    path: Owner | None = None
    kept_by: dict[Operation, tuple[float, float]] | None = None
    limits: tuple[float, float] | None = None

    def __init__(self, what: object, context: int) -> None:
        self.what: object = what
        self.context: int = context

    def finish(self) -> None:
        """End it, under the lock of the office."""
        self.done = True
        if self.kept_by is not None:
            self.kept_by.pop(self, None)
        if self.request is not None:
            self.request.end()

    def awaits(self) -> list[int]:
        """Return the ranks of the world of which any could end it by its next record."""
        raise NotImplementedError

    @property
    def is_any(self) -> bool:
        """Whether any of several ranks could end it."""
        return False

    @property
    def is_met(self) -> bool:
        """Whether it is a receive that has met its message already."""
        return False

    @property
    def is_served(self) -> bool:
        """Whether no call of another rank's program need end it."""
        return False

    def is_own(self, rank: int) -> bool:
        """Return whether a call of another thread of this ``rank`` could end it."""
        return rank in self.awaits()


class Send(Operation):
    """A message to a rank.

    Attributes
    ----------
    peer, tag, flags
        The rank of the world, the tag, and the flags of the envelope.
    data
        The bytes.
    dtype, shape
        Those of the array; no dtype for an object.
    number
        Its number, if the receiver answers it.
    """

    number: int = 0

    def __init__(
        self,
        what: object,
        context: int,
        peer: int,
        tag: int,
        data: memoryview,
        dtype: np.dtype[Any] | None,
        shape: tuple[int, ...],
        flags: int,
    ) -> None:
        self.what = what
        self.context = context
        self.peer: int = peer
        self.tag: int = tag
        self.data: memoryview = data
        self.dtype: np.dtype[Any] | None = dtype
        self.shape: tuple[int, ...] = shape
        self.flags: int = flags

    def awaits(self) -> list[int]:
        """Return its receiver."""
        return [self.peer]


class Letter:
    """A message that has come, or has been announced.

    Attributes
    ----------
    context, source, tag, flags, nbytes, dtype, shape, words
        As for `Envelope`; ``source`` is the sender, as a rank of the world.
    number
        As for `Envelope`; 0 if the sender waits for no answer.
    array
        Its memory, an array of its dtype and shape, or bytes; None if it was only announced, or goes into that of its receive.
    is_complete
        Whether all of it is there.
    receive
        The receive that it has met.
    place
        Its place among the messages that wait.
    """

    context: int
    flags: int
    tag: int
    number: int
    nbytes: int
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    words: str
    array: Array | None = None
    is_complete: bool = False
    receive: Receive | None = None
    place: int = 0

    def __init__(self, source: int, about: Envelope) -> None:
        self.source: int = source
        (
            self.context,
            _,
            self.flags,
            self.tag,
            self.number,
            self.nbytes,
            self.dtype,
            self.shape,
            self.words,
            _,
        ) = about

    @property
    def is_object(self) -> bool:
        """Whether it is an object and no array."""
        return bool(self.flags & OBJECT)

    @property
    def count(self) -> int:
        """The number of elements; 1 for an object."""
        return 1 if self.dtype is None else self.nbytes // self.dtype.itemsize if self.dtype.itemsize else 0

    def new_memory(self) -> Array:
        """Return memory for it; raises as `new_array`."""
        if self.dtype is None:
            return new_array((self.nbytes,), BYTE)
        return new_array(self.shape, self.dtype)

    def __str__(self) -> str:
        if self.is_object:
            return f"an object of {self.nbytes} bytes"
        return self.words or f"{self.dtype}{list(self.shape)}"


class Receive(Operation):
    """A message from a rank, or from any.

    Attributes
    ----------
    key
        The group, the rank of the world, and the tag that it fits.
    out
        The memory for the array; None for new memory.
    is_object
        Whether it takes objects, and no arrays.
    senders
        The ranks of the world that could send it.
    array
        The memory of the message that has come.
    number
        Its place among the receives that wait.
    about
        The sender and the beginning of the opening of a message that C has received into `array`.
    """

    error: BaseException | None = None
    array: Array | None = None
    spill: Array | None = None
    out: Array | None = None
    is_object: bool = False
    senders: tuple[int, ...] = ()
    number: int = 0
    about: tuple[int, bytes] | None = None
    _letter: Letter | None = None

    def __init__(
        self,
        what: object,
        context: int,
        source: int,
        tag: int,
        out: Array | None,
        senders: tuple[int, ...],
        *,
        is_object: bool = False,
    ) -> None:
        self.what = what
        self.key: tuple[int, int, int] = (context, source, tag)
        self.out = out
        self.is_object = is_object
        self.senders = senders

    @property
    def context(self) -> int:  # type: ignore[override]
        """The number of its group."""
        return self.key[0]

    @property
    def letter(self) -> Letter | None:
        """The message that it has met."""
        if self._letter is None and self.about is not None:
            source, opening = self.about
            self._letter = Letter(source, opened(memoryview(opening), source))
        return self._letter

    @letter.setter
    def letter(self, letter: Letter | None) -> None:
        self._letter, self.about = letter, None

    @property
    def is_any(self) -> bool:
        """Whether any of several ranks could send the message."""
        return self.letter is None and self.key[1] == NO_RANK

    @property
    def is_met(self) -> bool:
        """Whether it has met its message already."""
        return self.letter is not None

    def awaits(self) -> list[int]:
        """Return its sender, or all that it may come from."""
        if self.letter is not None:
            return [self.letter.source]
        return list(self.senders) if self.key[1] == NO_RANK else [self.key[1]]

    def is_own(self, rank: int) -> bool:
        """Return whether a call of another thread of this ``rank`` could end it: a message to the rank itself, or `Work.cancel`."""
        return not self.is_met and (self.request is not None or self.key[1] in (NO_RANK, rank))

    def fits(self, letter: Letter) -> bool:
        """Return whether it takes a message."""
        context, source, tag = self.key
        return context == letter.context and source in (NO_RANK, letter.source) and tag in (NO_TAG, letter.tag)

    def memory_for(self, letter: Letter) -> memoryview | None:
        """Meet a message; return the memory that its bytes go to. None, and an error of this receive alone, if it cannot have them."""
        self.letter = letter
        letter.receive = self
        self.error = self._problem(letter)
        if self.error is not None:
            return None
        if letter.array is not None and self.out is None:
            self.array = letter.array
            return bytes_of(letter.array)
        try:
            if self.out is None:
                self.array = letter.new_memory()
            elif self.out.flags.c_contiguous:
                self.array = self.out
            else:
                assert letter.dtype is not None
                self.array = self.spill = new_array((letter.count,), letter.dtype)
        except OutOfMemoryError as error:
            self.error = error
            return None
        return bytes_of(self.array)[: letter.nbytes]

    def arrive(self) -> None:
        """Take note that the bytes are there, and end."""
        if self.spill is not None and self.out is not None:
            self.out.flat[: self.spill.size] = self.spill
            self.array = self.out
        self.finish()

    def _problem(self, letter: Letter) -> OneAccordError | None:
        """Return why it cannot take a message that it has met."""
        out, is_object = self.out, bool(letter.flags & OBJECT)
        fits = out is None or is_object or (out.dtype == letter.dtype and out.nbytes >= letter.nbytes)
        if fits and is_object is self.is_object and not letter.words:
            return None
        sent = f"{self.what}: rank {letter.source} sent {letter} with tag {letter.tag}"
        if is_object is not self.is_object:
            other = "recv_object" if is_object else "recv"
            return DTypeError(f"{sent}: receive it with {other}; the message is lost", peer=letter.source)
        if letter.words or out is None:
            return DTypeError(f"{sent}, but this rank cannot make such an array: pip install ml_dtypes", peer=letter.source)
        if out.dtype != letter.dtype:
            return DTypeError(
                f"{sent}, but out= is {out.dtype}{list(out.shape)}: give an out= of that dtype; the message is lost",
                peer=letter.source,
            )
        return SizeMismatchError(
            f"{sent}, of {letter.count} elements, but out= has room for {out.size}: give a larger one, or leave it out; the message is lost",
            peer=letter.source,
        )
