"""A world whose ranks are threads of this process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from oneaccord.api import ThreadWorld, current_frames
from oneaccord_conformance import patience
from oneaccord_conformance.ranks import HERE, Here, Outcome, Program, outcome_of

__all__ = ["ThreadJob", "has_stuck_threads"]

_NAME = "conformance rank"
_FRAMES = 6


def has_stuck_threads() -> bool:
    """Return whether ranks that are threads still live, after all worlds have ended."""
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())


class ThreadJob:
    """Ranks that are threads, and run one program after the other in one group until the job ends.

    Parameters
    ----------
    backend, config
        The settings of their group.
    size
        How many there are.
    timeout_s
        The timeout of their group.
    """

    def __init__(self, backend: str, config: Mapping[str, Any] | str | None, size: int, timeout_s: float) -> None:
        self.size: int = size
        self._world = ThreadWorld(size, backend)
        self._here = Here(backend, {} if config is None else config, timeout_s, lambda _: None)
        self._orders: list[queue.SimpleQueue[tuple[Program, Mapping[str, Any]] | None]] = [
            queue.SimpleQueue() for _ in range(size)
        ]
        self._ended: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._live, args=(rank,), name=f"{_NAME} {rank}", daemon=True) for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, program: Program, facts: Mapping[str, Any], patience_s: float) -> list[Outcome | None]:
        """Run a program on every rank; return the result on each, None for a rank that was not done in time."""
        for orders in self._orders:
            orders.put((program, facts))
        found: dict[int, Outcome] = {}
        limit = time.monotonic() + patience_s
        while len(found) < self.size:
            try:
                rank, outcome = self._ended.get(timeout=max(limit - time.monotonic(), 0.01))
            except queue.Empty:
                break
            found[rank] = outcome
        return [found.get(rank) for rank in range(self.size)]

    def whereabouts(self) -> str:
        """Return words for the places of the ranks that are still busy."""
        frames = current_frames()
        lines = []
        for rank, thread in enumerate(self._threads):
            frame = frames.get(thread.ident or 0)
            places: list[str] = []
            while frame is not None and len(places) < _FRAMES:
                places.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
                frame = frame.f_back
            if places:
                lines.append(f"  rank {rank}: {' < '.join(places)}")
        return "\n".join(lines)

    def leave(self) -> None:
        """Let all ranks leave, and do not wait for them."""
        for orders in self._orders:
            orders.put(None)

    def end(self, patience_s: float) -> str:
        """Let all ranks leave; return the fault if one does not, otherwise an empty text.

        Ranks that do not leave by themselves are aborted; a thread that does not even end then is left behind.
        """
        self.leave()
        if self._joined(patience_s):
            return ""
        where = self.whereabouts()
        self._world.abort("oneaccord check ends this world")
        stuck = "" if self._joined(patience.PROMPT_S) else ", not even when it was aborted"
        return f"not all ranks left the world within {patience_s:g} s{stuck}:\n{where}"

    def _joined(self, patience_s: float) -> bool:
        limit = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(limit - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _live(self, rank: int) -> None:
        def body() -> None:
            token = HERE.set(self._here)
            try:
                with self._world.rank(rank), self._here.join() as group:
                    while (order := self._orders[rank].get()) is not None:
                        program, facts = order
                        outcome, error = outcome_of(lambda: program(group, **facts))  # noqa: B023 - called at once
                        self._ended.put((rank, outcome))
                        if error is not None:
                            raise error
            finally:
                HERE.reset(token)

        outcome, error = outcome_of(body)
        if error is not None:  # reported already, if a program raised it
            self._ended.put((rank, outcome))
