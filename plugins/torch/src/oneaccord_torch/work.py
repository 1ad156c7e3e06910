"""What torch gets for a call that is still running: its works and futures, which carry our errors."""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from oneaccord import Work, wait_all
from oneaccord.api import Runtime, current_runtime
from oneaccord.errors import OneAccordError
from oneaccord_torch.ranks import Completion

if TYPE_CHECKING:

    class _Base:  # what is public has complete types without torch as well
        pass
else:
    from torch.distributed import Work as _Base

__all__ = ["Handle", "seconds_of"]


_LAST_S = 5.0
_completing: set[threading.Lock] = set()
"""Locks, each held while a future is completed. C++ that a thread runs must not outlive the interpreter, which would abort the process."""


def _finish_futures() -> None:
    for lock in list(_completing):
        lock.acquire(timeout=_LAST_S)


# It runs after the groups have been closed, which register themselves later, and which end what they had in flight.
atexit.register(_finish_futures)
os.register_at_fork(after_in_child=_completing.clear)  # a child does not have its parent's threads


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return the seconds of a timeout of torch's; None if none was given, for which torch writes none, nothing or less."""
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


def _completing_of(begun: Any, runtime: Runtime) -> Callable[[object], None]:
    """Return what completes a future, in a thread that does nothing else meanwhile."""
    context, running = contextvars.copy_context(), threading.Lock()

    def run() -> None:
        context.run(begun.set_result, None)
        _completing.discard(running)
        running.release()

    def finish(_: object) -> None:
        running.acquire()
        _completing.add(running)
        # What is to follow may wait for later calls of the group, so that the thread of its callbacks must not do it.
        try:
            runtime.start(run)
        except RuntimeError:  # the interpreter is ending
            run()

    return finish


def _gpus_of(outputs: Sequence[Any]) -> list[Any]:
    """Return the devices of the tensors that are on GPUs, which may be in lists, each once."""
    found = [_gpus_of(each) if isinstance(each, list | tuple) else [each.device] for each in outputs]
    return list(dict.fromkeys(device for devices in found for device in devices if device.type == "cuda"))


class Handle(_Base):
    """One call of torch's, made of any number of ours.

    Parameters
    ----------
    works
        Our calls, which may have ended already.
    result
        What the call's future gives: torch's tensors, which the calls write to.
    then
        What is left to do with the results of the works, once all have ended, and before anybody hears of it.
    source
        The rank that a message comes from.
    """

    def __init__(
        self,
        works: Sequence[Work[Any]],
        result: list[Any],
        then: Callable[[list[Any]], object] | None = None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._works = works
        self._outputs = result
        self._then = then
        self._source = source
        self._finishing = threading.Lock()
        self._finished: list[Any] = []

    @classmethod
    def of(cls, handles: Sequence[Handle]) -> Handle:
        """Return one handle for several calls."""

        def then(_: list[Any]) -> None:
            for handle in handles:
                handle.wait()

        works = [work for handle in handles for work in handle._works]
        return cls(works, [tensor for handle in handles for tensor in handle._outputs], then)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is done.

        Parameters
        ----------
        timeout
            The most time to wait. By default as long as the call takes, which the group's timeout bounds.

        Raises
        ------
        DeadlineError
            ``timeout`` passed; the call goes on.
        OneAccordError
            What the call raised.
        """
        results = wait_all(self._works, timeout_s=seconds_of(timeout))
        with self._finishing:
            then, self._then = self._then, None
            if then is not None:
                then(results)
                self._finished = [torch.cuda.current_stream(device).record_event() for device in _gpus_of(self._outputs)]
                for (
                    result
                ) in results:  # torch allocated it for another stream, and must not use it again before this one is done
                    if isinstance(result, torch.Tensor) and result.is_cuda:
                        result.record_stream(torch.cuda.current_stream(result.device))
            else:
                for event in self._finished:  # another stream may have been told to finish the call
                    event.wait(torch.cuda.current_stream(event.device))
        return True

    def synchronize(self) -> None:
        """Wait as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, successfully or not."""
        if not all(work.done() for work in self._works):
            return False
        if self.exception() is None:
            self.wait()
        return True

    def is_success(self) -> bool:
        """Return whether the call has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a call that has failed."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Any]:
        """Wait, and return the tensors that the call has written to."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank of the group that a message comes from; -1 for a collective."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of torch's, whose value are the tensors that the call has written to, and whose error is the call's.

        For tensors on GPUs it is done once the call is enqueued, as those of NCCL in torch are: waiting for it makes a stream wait.
        """
        # By its devices a future finds the streams on which its callbacks run, and the events that whoever waits for it waits for
        # (ATen/core/ivalue.h: markCompleted, invokeCallback). Without them it takes all tensors for those of the CPU, and says nothing.
        gpus = _gpus_of(self._outputs)
        begun: Any = Future(devices=gpus) if gpus else Future()

        def end(_: Any) -> list[Any]:
            try:
                return self.result()
            except OneAccordError as error:
                raise error.with_traceback(None) from None  # torch writes all of it into its message

        # Not set_exception: what is written in C++, such as DDP, takes an error that is set so for a value.
        future = begun.then(end)
        runtime = current_runtime()
        if not self._works or self._works[-1].done():
            begun.set_result(None)
        elif runtime.is_simulated:
            Completion(runtime, self._works[-1], lambda: begun.set_result(None))
        elif gpus:
            _completing_of(begun, runtime)(None)  # `end` waits until the call is enqueued, on streams of the future's own
        else:
            self._works[-1].add_done_callback(_completing_of(begun, runtime))
        return future

    def get_future_result(self) -> Any:
        """Return a future as `get_future` does."""
        return self.get_future()
