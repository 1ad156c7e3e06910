"""The base on which the ranks of a job run: a clock, threads, and ways to wait.

Nearly always this is the computer itself (`oneaccord.runtime.computer`). A backend whose ranks live in a simulated world brings a `Runtime` of its own:
every wait of core then passes through it, so that it controls the order of threads and the time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol

__all__ = ["Condition", "History", "Place", "Runtime"]


class Place(Protocol):
    """A place where one thread waits once, until another one wakes it."""

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the wake-up; return whether it came.

        Parameters
        ----------
        timeout_s
            For at most so many seconds; None for any number.
        """
        ...

    def wake(self) -> None:
        """Wake the thread, now or when it comes to wait; twice is fine."""
        ...


class Condition(Protocol):
    """The part of `threading.Condition` that core uses."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> object: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until something is true; return whether it is.

        Parameters
        ----------
        predicate
            Returns whether the condition holds.
        timeout
            For at most so many seconds; None for any number.
        """
        ...

    def notify_all(self) -> None:
        """Wake all waiting threads, to look again."""
        ...


class Elements(Protocol):
    """Elements of a window."""

    def meets(self, other: Any) -> bool:
        """Return whether the two have an element in common."""
        ...


class History(Protocol):
    """What happened before what, among the ranks of a world that watches them; ranks are those of the world."""

    def begins(self, backend: str) -> bool:
        """Note that there is a window of ranks whose messages a backend moves; return whether the world sees all of these messages.

        Parameters
        ----------
        backend
            Its name.
        """
        ...

    def gives(self, rank: int, key: Hashable) -> None:
        """Note that a rank sends a message; those with one key are received in the order in which they were sent."""
        ...

    def takes(self, rank: int, key: Hashable) -> None:
        """Note that a rank has received the next message with a key."""
        ...

    def releases(self, rank: int, key: Hashable) -> None:
        """Note that what a rank has done comes before all that acquires the key from now on."""
        ...

    def acquires(self, rank: int, key: Hashable) -> None:
        """Note that what has released the key comes before what a rank does from now on."""
        ...

    def access(
        self,
        window: int,
        rank: int,
        target: int,
        elements: Elements,
        call: object,
        *,
        writes: bool,
        is_atomic: bool,
        ends: bool,
    ) -> str:
        """Note that a rank uses elements of a target's window; return words for a race, empty if there is none.

        Parameters
        ----------
        window, rank, target, elements, call
            The number of the window, the ranks, and the call.
        writes, is_atomic
            Whether the elements change, and whether that may happen beside other such calls.
        ends
            Whether the call is complete when it returns, and not only at `completes`.
        """
        ...

    def completes(self, window: int, rank: int, targets: Sequence[int]) -> None:
        """Note that what a rank has begun on the windows of some targets is complete."""
        ...


class Runtime(ABC):
    """The base on which ranks run.

    Attributes
    ----------
    history
        Finds races between ranks; None if nobody watches for them.
    is_simulated
        Whether a scheduler controls which thread runs. The scheduler itself finds that no thread can continue, so calls need not say what
        they wait for. It must see every call, so no call takes a short cut past the recorder.
    """

    is_simulated: bool = False
    history: History | None = None

    @abstractmethod
    def now(self) -> float:
        """Return the seconds since some moment; never less than before."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Let the calling thread do nothing for a time.

        Parameters
        ----------
        seconds
            How long.
        """

    @abstractmethod
    def compute(self, seconds: float) -> None:
        """Let the time pass that a simulated program would need to compute; no time if it really computes.

        Parameters
        ----------
        seconds
            How long.
        """

    @abstractmethod
    def mark(self, label: str) -> None:
        """Note for the readers of a trace that the calling rank has reached a point of its program.

        Parameters
        ----------
        label
            The point's name.
        """

    @abstractmethod
    def place(self, *, for_good: bool) -> Place:
        """Return a place where the calling thread will wait. Call it under the lock that the waking thread holds as well.

        Parameters
        ----------
        for_good
            Whether the thread makes no other call before it is woken.
        """

    @abstractmethod
    def condition(self) -> Condition:
        """Return a condition with a lock of its own."""

    @abstractmethod
    def start(self, action: Callable[[], None]) -> None:
        """Run an action in a background thread.

        Parameters
        ----------
        action
            The function to run; it must not raise.

        Raises
        ------
        RuntimeError
            No thread can be started.
        """

    @abstractmethod
    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run an action after a delay.

        Parameters
        ----------
        delay_s
            After how many seconds.
        action
            The function to run; it must not block.
        """

    def outside(self) -> AbstractContextManager[None]:
        """Let the calling thread wait, until the context ends, for something that no rank brings: a file, or another program."""
        return nullcontext()

    @abstractmethod
    def glance(self) -> None:
        """Note that the calling thread asks whether something has ended, and may ask again."""

    def choose(self, count: int) -> int:
        """Return which of several things happens that could all happen: the first, unless a scheduler draws another one.

        Parameters
        ----------
        count
            How many there are.
        """
        return 0

    @abstractmethod
    def enter(self, rank: int) -> None:
        """Note that the calling thread makes a call on a group of a rank.

        Parameters
        ----------
        rank
            The rank.

        Raises
        ------
        UsageError
            The thread belongs to another rank, if ranks are threads.
        """

    @abstractmethod
    def on_behalf(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return an action to run in another thread, for a call that the calling thread makes now.

        Parameters
        ----------
        action
            The function to run.
        """

    @abstractmethod
    def carry(self, source: int, dest: int, action: Callable[[], None]) -> None:
        """Run an action that brings word from one place of a job whose ranks are threads to another one.

        Parameters
        ----------
        source, dest
            Ranks; -1 is the job's store.
        action
            The function to run there.
        """

    @abstractmethod
    def identity(self, rank: int) -> tuple[str, int]:
        """Return the name of the host, and the number of the process, of a rank that is a thread.

        Parameters
        ----------
        rank
            The rank.
        """
