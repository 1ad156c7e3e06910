"""A job in the cluster from its submission to its end: output, signals, and what its end means."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, Self

from oneaccord.api import ConfigError, DeadlineError, RendezvousError, WholeJob
from oneaccord_kubernetes.cluster import Cluster, Gone, Pod, State
from oneaccord_kubernetes.manifest import Manifest
from oneaccord_kubernetes.output import Follower

__all__ = ["watched"]

_LOOK_S: Final = 1.0
_SILENT_S: Final = 120.0
"""How long the cluster may be out of reach before the job is given up."""
_LAST_S: Final = 15.0
"""How long the output of a pod that has ended may take to arrive."""
_HOPELESS_S: Final = 60.0
"""How long a pod may wait for what does not seem to come, such as an image."""
_HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def watched(cluster: Cluster, manifest: Manifest, start_timeout_s: float, job: WholeJob) -> int:
    """Submit a job, stay with it to its end, and return its exit code.

    When it returns because of a signal, or raises, the job is deleted. A job that has ended is left to its time to live, for ``kubectl`` to look at.

    Raises
    ------
    ConfigError, RendezvousError
        The cluster refuses the job, or cannot be reached; or a pod cannot begin.
    DeadlineError
        The pods did not begin in time, or the job took too long.
    """
    with _Signals() as signals:
        cluster.submit(manifest)
        watch = _Watch(cluster, manifest, signals, job)
        try:
            return watch.run(time.monotonic() + start_timeout_s)
        except BaseException:
            with contextlib.suppress(Gone, ConfigError, RendezvousError):
                cluster.delete(manifest.name)
            raise


class _Signals:
    """The signals that end the job, while this is entered; only the main thread gets any."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self._event = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in _HANDLED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Wait for that long, or until a signal comes."""
        self._event.wait(seconds)
        self._event.clear()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)
        self._event.set()


class _Watch:
    def __init__(self, cluster: Cluster, manifest: Manifest, signals: _Signals, job: WholeJob) -> None:
        self._cluster, self._manifest, self._signals, self._job = cluster, manifest, signals, job
        self._lock = threading.Lock()
        self._followers: dict[str, Follower] = {}
        self._pods: dict[str, Pod] = {}
        """All pods that were ever seen, by their marks."""
        self._hopeless: dict[str, float] = {}
        self._said = ""
        self._have_begun = False
        self._heard = time.monotonic()
        """When the cluster last answered."""

    def run(self, start_by: float) -> int:
        """Stay with the job to its end."""
        name = self._manifest.name
        _say(
            f"submitted {name} to the namespace {self._cluster.namespace}: {self._manifest.hosts} pods of {self._manifest.per_host} ranks"
        )
        state: State | None = None
        while state is None:
            if self._signals.came:
                return self._end_from_outside()
            try:
                with self._in_reach():
                    self._look()
                    state = self._cluster.state(name)
            except Gone:
                state = State(is_good=False, reason="Deleted", message="someone else has deleted the job")
            if state is None:
                self._check_start(start_by)
                self._signals.wait(_LOOK_S)
        self._read_the_rest(_LAST_S)
        return self._conclude(state)

    @contextlib.contextmanager
    def _in_reach(self) -> Iterator[None]:
        """Pass over a cluster that does not answer for a while."""
        try:
            yield
            self._heard = time.monotonic()
        except RendezvousError:
            if time.monotonic() > self._heard + _SILENT_S:
                raise

    def _look(self) -> None:
        """See which pods there are, and follow those that have begun."""
        there = {pod.uid: pod for pod in self._cluster.pods(self._manifest)}
        self._pods |= there
        for uid, pod in there.items():
            if pod.began and uid not in self._followers:
                self._followers[uid] = Follower(self._cluster, pod, self._show, _say)
        for uid, follower in self._followers.items():
            if uid not in there or there[uid].code is not None:
                follower.ended()

    def _check_start(self, start_by: float) -> None:
        """Say why pods do not begin; raise if they never will."""
        waiting = [pod for pod in self._newest().values() if not pod.began]
        self._have_begun = self._have_begun or (not waiting and len(self._newest()) == self._manifest.hosts)
        now = time.monotonic()
        for pod in waiting:
            since = self._hopeless.setdefault(pod.uid, now) if pod.is_hopeless else self._hopeless.pop(pod.uid, now)
            if pod.is_hopeless and now > since + _HOPELESS_S:
                raise ConfigError(f"the pod {pod.name} cannot begin: {pod.why}")
        why = next((f"{pod.name} waits: {pod.why}" for pod in waiting if pod.why), "")
        if why and why != self._said:
            _say(why)
            self._said = why
        if not self._have_begun and now > start_by:
            raise DeadlineError(
                f"{len(waiting) or 'all'} of {self._manifest.hosts} pods did not begin in time; the job is deleted. "
                f"{why or 'Kubernetes does not say why'}. More time: --option start_timeout_s="
            )

    def _newest(self) -> dict[int, Pod]:
        """Return the last pod of each number: one may come in the place of another."""
        return {pod.index: pod for pod in sorted(self._pods.values(), key=lambda pod: pod.born)}

    def _end_from_outside(self) -> int:
        """End the job because of a signal."""
        number = signal.Signals(self._signals.came[0])
        _say(f"{number.name}: deleting {self._manifest.name}; Ctrl-C again ends it at once")
        with contextlib.suppress(Gone):
            self._cluster.delete(self._manifest.name)
        until = time.monotonic() + self._job.grace_s + _LAST_S
        while time.monotonic() < until and any(pod.code is None for pod in self._there()):
            if signal.SIGINT in self._signals.came[1:]:
                with contextlib.suppress(Gone):
                    self._cluster.kill(self._manifest)
                break
            self._signals.wait(_LOOK_S)
        self._read_the_rest(_LAST_S)
        for follower in self._followers.values():
            _show_report(follower)
        _say(f"ended by {number.name}")
        return 128 + number

    def _there(self) -> list[Pod]:
        """Return the pods that are there, or were when the cluster last answered."""
        with self._in_reach(), contextlib.suppress(Gone):
            there = self._cluster.pods(self._manifest)
            self._look()
            return there
        return list(self._pods.values())

    def _read_the_rest(self, seconds: float) -> None:
        """Wait until the output of all pods is here, those that Kubernetes still ends included."""
        until = time.monotonic() + self._job.grace_s + seconds
        while time.monotonic() < until and any(pod.code is None for pod in self._there()):
            self._signals.wait(_LOOK_S)
        with self._in_reach():
            self._look()
        until = time.monotonic() + seconds
        for follower in self._followers.values():
            follower.ended()
            follower.join(max(0.0, until - time.monotonic()))

    def _conclude(self, state: State) -> int:
        """Say what the end of the job means, and return its exit code."""
        last = self._newest()
        failed = [pod for pod in last.values() if pod.code]
        if state.is_good or (state.reason == "FailedIndexes" and self._ended_well(last, failed)):
            for pod in failed:
                _say(f"the pod {pod.name}, {self._ranks(pod)}, failed, and the others continued: {_how(pod)}")
            return 0
        if state.reason == "DeadlineExceeded":
            raise DeadlineError(
                f"the job {self._manifest.name} was ended by Kubernetes: it lasted longer than timeout_s allows"
            )
        if not failed:
            _say(
                f"the job failed: {': '.join(each for each in (state.reason, state.message) if each) or 'Kubernetes does not say why'}"
            )
            return 1
        first = min(failed, key=lambda pod: (self._is_secondary(pod), pod.ended or pod.born, pod.index))
        follower = self._followers.get(first.uid)
        if follower is not None:
            _show_report(follower)
        _say(f"the pod {first.name}, {self._ranks(first)}, failed first: {_how(first)}")
        return first.code or 1

    def _ended_well(self, last: dict[int, Pod], failed: list[Pod]) -> bool:
        """Return whether a job that may continue without some of its pods did."""
        return self._job.may_go_on and len(failed) < len(last) and not any(map(self._is_secondary, failed))

    def _is_secondary(self, pod: Pod) -> bool:
        follower = self._followers.get(pod.uid)
        return follower is not None and follower.is_secondary

    def _ranks(self, pod: Pod) -> str:
        each = self._manifest.per_host
        first = pod.index * each
        return f"rank {first}" if each == 1 else f"ranks {first} to {first + each - 1}"

    def _show(self, line: bytes) -> None:
        with self._lock:
            _put(1, line)


def _how(pod: Pod) -> str:
    return f"exit code {pod.code}{f', {pod.why}' if pod.why else ''}"


def _show_report(follower: Follower) -> None:
    if follower.report:
        _put(2, follower.report)


def _say(words: str) -> None:
    _put(2, f"oneaccord run: {words}\n".encode(errors="backslashreplace"))


def _put(fd: int, data: bytes) -> None:
    """Write all of it, unless nothing reads it any more."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        (sys.stdout if fd == 1 else sys.stderr).flush()
        while view:
            view = view[os.write(fd, view) :]
