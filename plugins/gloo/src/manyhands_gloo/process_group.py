"""A process group of torch's: how the ranks of a job begin it, and how one of them waits for it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from manyhands.api import BackendUnavailableError, Bootstrap, CommError, ConfigError, Deadline, LinkLost, read_cards, write_card
from manyhands_gloo.config import GlooConfig
from manyhands_gloo.meeting import make_store
from manyhands_gloo.tensors import Tensors
from manyhands_gloo.waiters import Waiters

__all__ = ["ProcessGroup", "reason"]

_UNLIMITED = timedelta(days=7)
"""What stands for no limit: the deadlines are manyhands', and a timeout of Gloo's breaks connections."""
_SLICE_S = 0.05
_FIRST_STALL_S = 0.4
_NEXT_STALL_S = 0.5
_VERDICT_S = 1.0
"""How long an error of Gloo waits for the job to learn what caused it, such as a rank that died."""


class ProcessGroup:
    """The process group of a job, and the memory that it uses.

    Parameters
    ----------
    bootstrap
        Who this rank is, and how it finds the others.
    config
        What is set.

    Attributes
    ----------
    rank, size
        Who this rank is.
    torch, distributed
        The modules.
    tensors
        Makes tensors over memory of NumPy.
    group
        The process group.
    waiters
        The threads that wait for messages.
    ended
        Why nobody may wait any more; empty while all is well.

    Raises
    ------
    BackendUnavailableError
        torch has no Gloo, or Gloo cannot listen where it was told to.
    ConfigError
        The ranks have different ``[backends.gloo]``.
    DeadlineError
        Another rank did not get ready in time.
    """

    def __init__(self, bootstrap: Bootstrap, config: GlooConfig) -> None:
        self.config: GlooConfig = config
        self.rank: int = bootstrap.rank
        self.size: int = bootstrap.world_size
        self.ended: str = ""
        self.waiters: Waiters = Waiters()
        self._held: dict[int, object] = {}
        self.torch: Any = importlib.import_module("torch")
        self.distributed: Any = importlib.import_module("torch.distributed")
        self.tensors: Tensors = Tensors(self.torch)
        if not self.distributed.is_available() or not self.distributed.is_gloo_available():
            raise BackendUnavailableError("this build of torch has no Gloo: pip install torch brings one that has")
        mine = {"native": config.native, "check": config.check, "torch": str(self.torch.__version__)}
        _compare(read_cards(bootstrap.exchange("gloo", write_card(mine)), dict[str, bool | str]))
        self.group: Any = self._join(bootstrap)

    def _join(self, bootstrap: Bootstrap) -> Any:
        gloo = self.distributed.ProcessGroupGloo
        where = {"interface": self.config.interface} if self.config.interface and not self.config.host else {}
        host = self.config.host or bootstrap.host
        try:
            device = gloo.create_device(**where) if where else gloo.create_device(hostname=host)
        except RuntimeError as error:
            raise BackendUnavailableError(
                f"Gloo cannot listen at {self.config.interface if where else host!r}: {reason(error)}; give host or interface in "
                "[backends.gloo]"
            ) from error
        options = gloo._Options()
        options._devices = [device]
        options._timeout = _UNLIMITED
        options._threads = self.config.threads
        return gloo(make_store(bootstrap, self.distributed), self.rank, self.size, options)

    def end(self, why: str) -> None:
        """Let nobody wait any more; the first reason stays."""
        self.ended = self.ended or why

    def check(self) -> None:
        """Raise `LinkLost` when the backend has ended."""
        if self.ended:
            raise LinkLost((self.rank + 1) % self.size, self.ended)

    def living(self) -> Any:
        """Return Gloo's group; raise RuntimeError where another thread has closed it."""
        group = self.group
        if group is None:
            raise RuntimeError(self.ended)
        return group

    def hold(self, what: object) -> None:
        """Keep memory that Gloo uses, until `release`: for ever where a call fails."""
        self._held[id(what)] = what

    def release(self, what: object) -> None:
        """Let go of memory that Gloo is done with."""
        self._held.pop(id(what), None)

    def wait(self, work: Any, deadline: Deadline, on_stall: Callable[[list[int]], None] | None) -> None:
        """Return when a collective of Gloo is done.

        Raises
        ------
        LinkLost
            The backend ended, or a connection broke because a rank was lost.
        CommError
            Gloo failed, and no rank was lost.
        TimeoutError
            The deadline passed; the collective goes on.
        """
        stall_at = time.monotonic() + _FIRST_STALL_S
        while True:
            try:
                work.wait(timedelta(seconds=max(0.001, min(_SLICE_S, deadline.remaining()))))
            except RuntimeError as error:
                if work.is_completed():
                    if work.is_success():
                        return  # it ended just after the slice had
                    raise self._broken(error) from error
            else:
                return
            self.check()
            if deadline.passed():
                raise TimeoutError("the deadline passed")
            if on_stall is not None and time.monotonic() >= stall_at:
                on_stall([rank for rank in range(self.size) if rank != self.rank])
                stall_at = time.monotonic() + _NEXT_STALL_S

    def _broken(self, error: Exception) -> Exception:
        """Return what to raise for an error of Gloo in a collective: no rank is to blame unless the job says so."""
        # A broken connection is only how a death shows itself here; the job knows within a moment who died.
        patience = Deadline(_VERDICT_S)
        while not self.ended and not patience.passed():
            time.sleep(0.005)
        if self.ended:
            return LinkLost((self.rank + 1) % self.size, f"{self.ended}; {reason(error)}")
        return CommError(f"Gloo failed: {reason(error)}", rank=self.rank)


def _compare(cards: list[dict[str, bool | str]]) -> None:
    for rank, card in enumerate(cards):
        for key, value in card.items():
            if value != cards[0].get(key):
                raise ConfigError(
                    f"{'torch' if key == 'torch' else f'backends.gloo.{key}'} is {cards[0].get(key)!r} on rank 0 and {value!r} on rank {rank}: all "
                    "ranks need the same",
                    key=f"backends.gloo.{key}",
                    value=value,
                )


def reason(error: Exception) -> str:
    """Return what an error of Gloo says, without the place in its source and without its advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    text = lines[0].partition("] ")[2] if lines[0].startswith("[/") else lines[0]
    return text.partition(" This is typically")[0] or type(error).__name__
