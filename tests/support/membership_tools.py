"""A membership for tests: a clock of its own, what it has sent to each rank, and the messages that ranks send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oneaccord.control import protocol as messages
from oneaccord.control.membership import Membership
from oneaccord.control.protocol import FromStore, Join, Progress, Question, Stalled, Verdict, Wait


class Job:
    """A membership with a clock of its own, and what it has sent to each rank."""

    def __init__(self, world_size: int = 3, *, joined: bool = True) -> None:
        self.sent: dict[int, list[FromStore]] = {rank: [] for rank in range(world_size)}
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.store = Membership(world_size, b"key", self._send, self._later)
        if joined:
            for rank in range(world_size):
                assert self.join(rank) is None
            self.forget()

    def _send(self, rank: int, message: FromStore) -> None:
        self.sent[rank].append(message)

    def _later(self, delay_s: float, function: Callable[[], None]) -> None:
        self._timers.append((self.now + delay_s, function))

    def forget(self) -> None:
        """Forget what was sent so far."""
        for heard in self.sent.values():
            heard.clear()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and run what was to run by then."""
        self.now += seconds
        due = [timer for timer in self._timers if timer[0] <= self.now]
        self._timers = [timer for timer in self._timers if timer[0] > self.now]
        for _, function in due:
            function()

    def join(self, rank: int, /, **changes: Any) -> Verdict | None:
        facts: dict[str, Any] = {
            "rank": rank,
            "world_size": self.store.world_size,
            "backend": "tcp",
            "choices": "",
            "version": "1",
            "byteorder": "little",
            "host": f"host{rank}",
            "pid": 100 + rank,
        }
        return self.store.join(Join(**{**facts, **changes}))

    def answer(self, rank: int, text: str, *, entered: bool = True) -> None:
        """Let a rank answer the last question that it was asked."""
        question = next(message for message in reversed(self.sent[rank]) if isinstance(message, Question))
        self.store.handle(rank, messages.Testimony(question.inquest, entered, text))

    def verdicts(self) -> list[list[Verdict]]:
        return [[message for message in heard if isinstance(message, Verdict)] for heard in self.sent.values()]

    def the_verdict(self, *, but: tuple[int, ...] = ()) -> Verdict:
        """Return the one verdict that every rank was told, once."""
        told = [heard for rank, heard in enumerate(self.verdicts()) if rank not in but]
        assert all(len(heard) == 1 for heard in told), told
        assert len({heard[0].text for heard in told}) == 1
        return told[0][0]


def progress(calls: int = 0) -> Progress:
    return Progress({0: calls}, {}, {})


def alone(wait: Wait, progress: Progress, *, quiet: bool = True) -> Stalled:
    """Return the report of a rank that is in one call."""
    return Stalled(wait, [wait], progress, quiet)


def stalled(
    sequence: int,
    digest: bytes,
    *,
    operation: str = "barrier",
    awaiting: list[int] | None = None,
    members: tuple[int, ...] = (0, 1, 2),
) -> Stalled:
    return alone(Wait(0, sequence, operation, digest, awaiting or [], [], list(members)), progress(sequence + 1))


def recv(source: int, number: int = 0, *, quiet: bool = True) -> Stalled:
    wait = Wait(1, 1, f"recv from rank {source}", b"", [source], [(source, False, number)], [0, 1, 2])
    return alone(wait, talked({}, {source: number + 1}), quiet=quiet)


def talked(sent: dict[int, int], received: dict[int, int]) -> Progress:
    """Say how many messages a rank has begun to send to each peer, and to receive from each."""
    return Progress({}, {1: sent}, {1: received})
