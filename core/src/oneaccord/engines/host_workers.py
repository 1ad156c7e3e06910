"""Workers on the hosts of a host launcher, so that `oneaccord.launch` runs functions there."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from oneaccord._version import __version__
from oneaccord.common.threads import Thread
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.launcher import Ask, HostLauncher
from oneaccord.contract.workers import Worker, WorkerLost
from oneaccord.engines.agent import MARK, START_S
from oneaccord.engines.hosts import Share, how_ended, passed_on, raise_refused, share_out, start_agent
from oneaccord.engines.local import LocalOptions
from oneaccord.engines.outbox import Outbox
from oneaccord.errors import DeadlineError, OneAccordError, RendezvousError

__all__ = ["HostWorkers"]

_END_S: Final = 10.0
"""How much longer than the grace of its ranks an agent may take to end."""
_NOISE_BYTES: Final = 1 << 12


class HostWorkers:
    """The hosts of a launcher as a `oneaccord.contract.workers.WorkerLauncher`: an agent on each host has workers of its own.

    Parameters
    ----------
    launcher
        What gives the hosts; they are given back by `stop`.
    options
        How the workers run.
    """

    def __init__(self, launcher: HostLauncher, options: LocalOptions) -> None:
        self._launcher = launcher
        self._options = options
        self._lock = threading.Lock()
        self._agents: list[_Agent] = []
        self._process = os.getpid()
        self._is_stopped = False

    def place(self, ask: Ask, deadline: Deadline) -> Sequence[Worker]:
        """Get the hosts, and start the workers there.

        Raises
        ------
        UsageError
            The ranks do not fit on the hosts, or a host cannot have them.
        RendezvousError
            A host cannot be reached, or has no oneaccord; the message names it.
        DeadlineError
            The hosts were not there, or not ready, in time.
        """
        try:
            shares = share_out(self._launcher.allocate(ask, deadline), ask)
            order = {"version": __version__, "variables": passed_on(), "path": [each or str(Path.cwd()) for each in sys.path]}
            for share in shares:
                self._agents.append(_Agent(self._launcher, share, order, self._options, ask.ranks))
            ready = Deadline(max(0.001, min(START_S, deadline.remaining())))
            for agent in self._agents:
                agent.await_ready(ready)
        except BaseException:
            self.stop()
            raise
        return [
            Worker(rank, agent.share.host.name, agent.share.host.address, agent)
            for agent in self._agents
            for rank in agent.share.ranks
        ]

    def call(self, worker: Worker, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        """Run a function in a worker."""
        agent: _Agent = worker.handle
        return agent.call(worker.index - agent.share.ranks.start, function, args)

    def stop(self, workers: Sequence[Worker] = ()) -> None:
        """End all workers, and give the hosts back."""
        del workers  # they are all there are
        with self._lock:
            if self._is_stopped or self._process != os.getpid():
                return
            self._is_stopped = True
        for agent in self._agents:
            agent.outbox.send(stop=True)
        until = Deadline(self._options.grace_s + _END_S)
        for agent in self._agents:
            agent.close(until)
        self._launcher.release()


class _Agent:
    """The process that leads to the agent of a host, and the calls that it has not answered."""

    def __init__(self, launcher: HostLauncher, share: Share, order: dict[str, Any], options: LocalOptions, total: int) -> None:
        self.share = share
        self._process: subprocess.Popen[bytes] = start_agent(launcher, share.host)
        self._lock = threading.Lock()
        assert self._process.stdin is not None
        self.outbox = Outbox(self._process.stdin)
        self._count = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._noise = bytearray()
        self._is_ready = threading.Event()
        self._refused: dict[str, str] | None = None
        self._gone: str | None = None
        given = {"options": asdict(options), "first_rank": share.ranks.start, "total": total, "ranks": len(share.ranks)}
        self._threads = [
            Thread(target=target, name="oneaccord-host", daemon=True) for target in (self._read_answers, self._read_noise)
        ]
        for thread in self._threads:
            thread.start()
        self.outbox.send(**order, folder=share.host.folder, workers={**given, "path": order["path"]})

    def await_ready(self, deadline: Deadline) -> None:
        """Wait until the workers are there."""
        name = self.share.host.name
        if not self._is_ready.wait(deadline.remaining()):
            words = self._noise.decode(errors="replace").strip() or "said nothing"
            raise DeadlineError(f"host {name} did not get ready within {deadline.timeout_s:g} s: {words}")
        if self._refused is not None:
            raise_refused(name, self._refused)
        if self._gone is not None:
            raise RendezvousError(f"host {name} cannot be reached, or has no oneaccord: {self._gone}")

    def call(self, index: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            gone, number = self._gone, next(self._count)
            if gone is None:
                self._pending[number] = future
        if gone is not None:
            future.set_exception(self._lost(gone))
            return future
        packed = base64.b64encode(pickle.dumps((function, args), protocol=pickle.HIGHEST_PROTOCOL)).decode()
        self.outbox.send(call=[number, index, packed])
        return future

    def close(self, deadline: Deadline) -> None:
        """Wait for the end of the agent; end the connection at the deadline, which ends the agent."""
        try:
            self._process.wait(deadline.remaining())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.outbox.close()
        self.outbox.join(_END_S)
        for thread in self._threads:
            thread.join(_END_S)
        for pipe in (self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                ((kind, value),) = json.loads(line[len(MARK) :]).items()
                self._take(kind, value)
            else:
                self._keep(line)
        code = self._process.wait()
        self._threads[1].join(_END_S)
        words = self._noise.decode(errors="replace").strip()
        reason = how_ended(str(self._process.args[0]), code, words)  # type: ignore[index] # a sequence
        with self._lock:
            self._gone = reason
            left = list(self._pending.values())
            self._pending.clear()
        self._is_ready.set()
        for future in left:
            future.set_exception(self._lost(reason))

    def _take(self, kind: str, value: Any) -> None:
        if kind == "output":
            stream = sys.stdout if value[0] == 1 else sys.stderr
            with contextlib.suppress(Exception):  # streams of any kind, or none: no job ends because of its output
                stream.write(base64.b64decode(value[1]).decode(errors="replace"))
                stream.flush()
        elif kind == "ready":
            self._is_ready.set()
        elif kind == "refused":
            self._refused = value
            self._is_ready.set()
        elif kind == "answer":
            number, packed = value
            with self._lock:
                future = self._pending.pop(number)
            try:
                is_good, answer = pickle.loads(base64.b64decode(packed))  # noqa: S301 - from a process that this one has started
            except Exception as error:  # noqa: BLE001 - of any kind
                is_good, answer = False, OneAccordError(f"the answer of host {self.share.host.name} cannot be read: {error}")
            future.set_result(answer) if is_good else future.set_exception(answer)

    def _read_noise(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._keep(line)
            if self._is_ready.is_set() and self._gone is None:
                with contextlib.suppress(Exception):
                    sys.stderr.write(line.decode(errors="replace"))

    def _keep(self, noise: bytes) -> None:
        """Keep the end of what is neither output nor an answer: it may say why the host is lost."""
        self._noise += noise
        del self._noise[:-_NOISE_BYTES]

    def _lost(self, reason: str) -> WorkerLost:
        return WorkerLost(f"its host {self.share.host.name} was lost: {reason}")
