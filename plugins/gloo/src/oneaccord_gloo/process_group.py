"""A process group of torch's: how the ranks of a job begin it, and how one of them waits for it."""

from __future__ import annotations

import importlib
import math
from datetime import timedelta
from typing import Any

from oneaccord.api import (
    BackendUnavailableError,
    BlockingCalls,
    Bootstrap,
    Deadline,
    LibraryUse,
    StallCallback,
    compare_settings,
    read_cards,
    write_card,
)
from oneaccord_gloo.config import GlooConfig
from oneaccord_gloo.meeting import make_store
from oneaccord_gloo.tensors import Tensors

__all__ = ["ProcessGroup", "reason"]

_UNLIMITED = timedelta(days=7)
"""What stands for no limit: the deadlines are oneaccord', and a timeout of Gloo's breaks connections."""
_SLICE_S = 0.05


class ProcessGroup(LibraryUse):
    """The process group of a job, and the memory that it uses.

    Parameters
    ----------
    bootstrap
        The identity of this rank, and how it finds the others.
    config
        What is set.

    Attributes
    ----------
    torch, distributed
        The modules.
    tensors
        Makes tensors over memory of NumPy.
    group
        The process group.
    calls
        The threads that wait for messages.

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
        super().__init__("Gloo", bootstrap.rank, bootstrap.world_size, math.inf)  # its own waits sleep
        self.calls: BlockingCalls = BlockingCalls("oneaccord-gloo")
        self.torch: Any = importlib.import_module("torch")
        self.distributed: Any = importlib.import_module("torch.distributed")
        self.tensors: Tensors = Tensors(self.torch)
        if not self.distributed.is_available() or not self.distributed.is_gloo_available():
            raise BackendUnavailableError("this build of torch has no Gloo: install one that has (pip install torch)")
        mine = {"native": config.native, "check": config.check, "torch": str(self.torch.__version__)}
        cards = read_cards(bootstrap.exchange("gloo", write_card(mine)), dict[str, bool | str])
        compare_settings("gloo", cards, {"torch": "torch"})
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

    def living(self) -> Any:
        """Return Gloo's group; raise RuntimeError if another thread has closed it."""
        group = self.group
        if group is None:
            raise RuntimeError(self.ended)
        return group

    def wait(self, work: Any, deadline: Deadline, on_stall: StallCallback | None) -> None:
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

        def is_done() -> bool:
            try:
                work.wait(timedelta(seconds=max(0.001, min(_SLICE_S, deadline.remaining()))))
            except RuntimeError as error:
                if not work.is_completed():
                    return False
                if not work.is_success():
                    raise self.failure(reason(error)) from error
                # It ended just after the slice had.
            return True

        self.wait_for(is_done, 0, deadline, on_stall)


def reason(error: Exception) -> str:
    """Return what an error of Gloo says, without the place in its source and without its advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    text = lines[0].partition("] ")[2] if lines[0].startswith("[/") else lines[0]
    return text.partition(" This is typically")[0] or type(error).__name__
