"""The launcher `local`: workers that are processes of this host."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from oneaccord.common.checks import is_number
from oneaccord.common.threads import Thread
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.launcher import Ask
from oneaccord.contract.workers import Worker, WorkerLost
from oneaccord.engines.channel import Channel
from oneaccord.errors import UsageError
from oneaccord.local.failure import Failure
from oneaccord.local.forked import ForkServer, fork_server
from oneaccord.local.launching import Launch
from oneaccord.local.owner import Owner, PythonScreen
from oneaccord.local.processes import run_job
from oneaccord.local.variables import shared_variables, with_hash_seed
from oneaccord.net.forking import close_after_fork
from oneaccord.net.loop import Loop

__all__ = ["LocalOptions", "LocalWorkers"]

_PROGRAM: Final = "oneaccord.engines.local_worker"
_PRELOADED: Final = ("oneaccord.engines.channel", "oneaccord.engines.worker_main")
_EXIT_S: Final = 5.0
"""How long an idle worker may take to end, with what its program does at exit."""
_END_S: Final = 10.0
"""How much longer than the grace the launcher may take to end all."""


@dataclass(frozen=True)
class LocalOptions:
    """The options of ``on="local"``.

    Attributes
    ----------
    prefix
        Whether each line of output begins with its rank.
    grace_s
        Seconds that ranks may take to end after Ctrl-C, a missed deadline, or the failure of another one.
    environ
        Variables to set for the ranks.
    fork
        Whether ranks may be forked from a process that has made their imports.
    """

    prefix: bool = True
    grace_s: float = 3.0
    environ: Mapping[str, str] = field(default_factory=dict)
    fork: bool = True

    def __post_init__(self) -> None:
        grace_s: Any = self.grace_s
        environ: Any = self.environ
        if not is_number(grace_s) or not 0 <= grace_s <= 1e6:
            raise UsageError(f"grace_s must be a number of seconds from 0 to 1e6, not {self.grace_s!r}")
        if not isinstance(environ, Mapping) or not all(isinstance(each, str) for pair in environ.items() for each in pair):
            raise UsageError(f"environ must be a mapping from names to values, all of them texts, not {self.environ!r}")
        for name, value in environ.items():
            if not name or "=" in name or "\0" in name + value:
                raise UsageError(f"environ has {name!r}, but no variable can have such a name or its value")
        for option in ("prefix", "fork"):
            if not isinstance(getattr(self, option), bool):
                raise UsageError(f"{option} must be True or False, not {getattr(self, option)!r}")


class LocalWorkers:
    """Processes of this host, as a `oneaccord.contract.workers.WorkerLauncher`.

    A thread of the program runs them by `oneaccord.local.processes.run_job`; another one carries calls and answers.

    Parameters
    ----------
    options
        How they run.
    modules
        What each worker will import, besides what every rank does.
    first_rank, total
        The first rank of this host and the number of all, if there are others elsewhere; both are for the output.
    """

    def __init__(
        self, options: LocalOptions, modules: Sequence[str] = (), first_rank: int = 0, total: int | None = None
    ) -> None:
        self._first_rank = first_rank
        self._total = total
        self._options = options
        self._modules = (*_PRELOADED, *modules)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._is_stopped = False
        self._thread: Thread | None = None
        self._loop: Loop | None = None
        self._signals: socket.socket | None = None
        self._answers: deque[Callable[[], None]] = deque()
        """What waits in the loop's thread until the output before it is shown, and how many of them wait for the request under way."""
        self._asked = 0

    def place(self, ask: Ask, deadline: Deadline) -> Sequence[Worker]:
        """Start the workers; their imports go on while this returns."""
        del deadline  # nothing here waits
        if ask.per_host is not None and ask.per_host < ask.ranks:
            raise UsageError(
                f'per_host={ask.per_host} with {ask.ranks} ranks and on="local": this is one host; leave per_host out'
            )
        environ = with_hash_seed({**os.environ, **self._options.environ})
        gpus = _gpus(ask, environ)
        job = Launch(
            _PROGRAM,
            is_module=True,
            ranks=ask.ranks,
            first_rank=self._first_rank,
            total=self._total,
            prefix=self._options.prefix,
            keep_going=True,
            fork=self._options.fork,
            grace_s=self._options.grace_s,
        )
        with contextlib.ExitStack() as undo:  # if there are no more files or threads
            server = fork_server(_PROGRAM, True, shared_variables(ask.ranks, environ)) if self._options.fork else None
            if server is not None:
                undo.callback(server.close)
            self._loop = Loop("oneaccord-launch", self._crashed)
            undo.callback(self._loop.stop)
            self._begin(job, environ, server, self._loop, gpus)
            undo.pop_all()
        host = socket.gethostname()
        return [Worker(index, host, "127.0.0.1") for index in range(ask.ranks)]

    def _begin(
        self,
        job: Launch,
        environ: Mapping[str, str],
        server: ForkServer | None,
        loop: Loop,
        gpus: Sequence[Mapping[str, str]],
    ) -> None:
        pairs = [socket.socketpair() for _ in gpus]
        self._processes = [_Process(loop, *pair, self._after_output) for pair in pairs]
        path = [each or str(Path.cwd()) for each in sys.path]
        for process, variables in zip(self._processes, gpus, strict=True):
            process.channel.send(pickle.dumps((path, variables)))
        signals, self._signals = socket.socketpair()
        for each in (signals, self._signals, *(theirs for _, theirs in pairs)):
            close_after_fork(each)
        signals.setblocking(False)
        screens = PythonScreen("standard output"), PythonScreen("standard error")
        owner = Owner(signals, [theirs for _, theirs in pairs], screens, self._ended, shown=lambda: loop.call(self._shown))
        thread = Thread(target=self._run, args=(job, environ, server, owner), name="oneaccord-local", daemon=True)
        thread.start()
        self._thread = thread

    def call(self, worker: Worker, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        """Run a function in a worker."""
        return self._processes[worker.index].call(function, args)

    def stop(self, workers: Sequence[Worker] = ()) -> None:
        """End all workers: those without a call at once, the others by Ctrl-C and, after the grace, SIGKILL.

        While a worker still starts, no function of the user has a group, and Ctrl-C would only show a traceback of the start: SIGTERM ends it.
        """
        del workers  # they are all there are
        with self._lock:
            if self._is_stopped or self._thread is None or self._process != os.getpid():
                return
            self._is_stopped = True
        assert self._signals is not None
        assert self._loop is not None
        is_idle = not any(process.pending for process in self._processes)
        is_early = any(process.pending and not process.has_begun for process in self._processes)
        for process in self._processes:
            process.channel.close()
        if is_idle:
            self._thread.join(_EXIT_S)
        if self._thread.is_alive():
            with contextlib.suppress(OSError):  # they have just ended
                self._signals.send(bytes([signal.SIGTERM if is_early else signal.SIGINT]))
            self._thread.join(self._options.grace_s + _END_S)
        self._loop.stop()
        self._signals.close()

    def _run(self, job: Launch, environ: Mapping[str, str], server: ForkServer | None, owner: Owner) -> None:
        reason: Exception = WorkerLost("its launcher has ended")
        try:
            run_job(job, environ, server, self._modules, owner)
        except Exception as error:  # noqa: BLE001 - the calls raise it
            reason = error
        finally:
            owner.signals.close()
            for each in owner.stdin or ():
                each.close()
            for process in self._processes:
                process.end(reason)
            assert self._loop is not None
            self._loop.call(self._shown)

    def _after_output(self, settle: Callable[[], None]) -> None:
        """Settle a call when what its worker has printed before the answer is shown; in the loop's thread."""
        self._answers.append(settle)
        self._ask()

    def _ask(self) -> None:
        if self._asked or not self._answers:
            return
        self._asked = len(self._answers)
        assert self._signals is not None
        try:
            self._signals.send(b"\0")
        except OSError:  # all ranks have ended, and their output is shown
            self._shown()

    def _shown(self) -> None:
        for _ in range(self._asked):
            self._answers.popleft()()
        self._asked = 0
        self._ask()

    def _ended(self, failure: Failure) -> None:
        self._processes[failure.rank - self._first_rank].end(WorkerLost(failure.how))

    def _crashed(self, error: Exception) -> None:
        for process in self._processes:
            process.end_now(error)


class _Process:
    """One process, and the calls that it has not answered."""

    def __init__(
        self, loop: Loop, sock: socket.socket, its: socket.socket, after_output: Callable[[Callable[[], None]], None]
    ) -> None:
        self._loop = loop
        self._its = its
        self._after_output = after_output
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._gone: Exception | None = None
        self.pending: dict[int, Future[Any]] = {}
        self.has_begun: bool = False
        self.channel = Channel(loop, sock, self._answered, self._hung_up)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            gone, number = self._gone, next(self._count)
            if gone is None:
                self.pending[number] = future
        if gone is None:
            self.channel.send(pickle.dumps((number, function, args), protocol=pickle.HIGHEST_PROTOCOL))
        else:
            future.set_exception(gone)
        return future

    def end(self, reason: Exception) -> None:
        """Take note that the process has ended, after all that it has said; from any thread."""
        self._loop.call(partial(self._end, reason))

    def _end(self, reason: Exception) -> None:
        self.channel.drain()
        self.channel.close()
        self.end_now(reason)

    def end_now(self, reason: Exception) -> None:
        with self._lock:
            self._gone = self._gone or reason
            left = list(self.pending.values())
            self.pending.clear()
        for future in left:
            future.set_exception(self._gone)

    def _answered(self, message: memoryview) -> None:
        number, is_good, value = pickle.loads(message)  # noqa: S301 - from a process that this one has started
        self.has_begun = True
        self._its.close()  # it holds it now, and must be the only one, or its end of the connection would not be seen
        with self._lock:
            future = self.pending.pop(number, None)
        if future is not None:
            self._after_output(partial(future.set_result if is_good else future.set_exception, value))

    def _hung_up(self) -> None:
        """Give the launcher a moment to see how the process has ended: its end closes the connection, and so does a program that closes all files."""
        self._loop.call_later(
            _EXIT_S, partial(self.end_now, WorkerLost("it closed the connection to the program that started it"))
        )


def _gpus(ask: Ask, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables by which each rank sees GPUs of its own; none if it is to have none of its own."""
    if not ask.gpus:
        return [{} for _ in range(ask.ranks)]
    name = "CUDA_VISIBLE_DEVICES"
    if name in environ:
        there = [each.strip() for each in environ[name].split(",") if each.strip()]
    else:
        there = [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    if len(there) < ask.ranks * ask.gpus:
        raise UsageError(
            f"{ask.ranks} ranks with gpus={ask.gpus} each need {ask.ranks * ask.gpus} GPUs, and this host has {len(there)}"
            + (f" ({name}={environ[name]})" if name in environ else "")
        )
    return [{name: ",".join(there[rank * ask.gpus : (rank + 1) * ask.gpus])} for rank in range(ask.ranks)]
