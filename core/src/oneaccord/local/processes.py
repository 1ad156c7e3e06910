"""Running the ranks of one host: start them, pass on what they print, end all when one fails, leave nothing behind."""

from __future__ import annotations

import os
import select
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import IO, Self, cast

from oneaccord.common.ranks import show_ranks
from oneaccord.common.variables import Variable, of_setting
from oneaccord.errors import UsageError
from oneaccord.job import error_file
from oneaccord.local.child import Child
from oneaccord.local.elastic import Elastic
from oneaccord.local.failure import conclude, files_of_recorders, report_records
from oneaccord.local.forked import ForkedRank, ForkServer, fork_server, why_no_fork
from oneaccord.local.groups import (
    Left,
    Spawned,
    all_signals,
    is_stopped,
    left_in_group,
    name_of,
    signal_group,
    signals_as_bytes,
)
from oneaccord.local.guard import Guard, guarded
from oneaccord.local.launching import Launch
from oneaccord.local.logs import Logs
from oneaccord.local.meeting_place import MeetingPlace, arrange_meeting
from oneaccord.local.orphans import Orphans
from oneaccord.local.output import Stream, screens
from oneaccord.local.owner import Owner
from oneaccord.local.stdin import StandardInput
from oneaccord.local.variables import shared_variables, with_hash_seed

__all__ = ["run_job"]

_GRACE_S = 1.0
"""How long the other ranks may take to fail by themselves, with errors that name the first cause."""
_END_S = 3.0
"""How long a rank may take to end because of another one, or when nobody reads what it prints."""
_STOP_S = 30.0
"""How long a rank may take to end after a signal to the launcher, as with schedulers."""
_DRAIN_S = 1.0
"""How long output is still read when all ranks have ended: a process that left its rank's group may keep a pipe open."""
_LOOK_S = 0.1
"""How often the launcher looks whether what ranks have left running has ended."""
_PATIENCE_S = 0.2
_READ_BYTES = 1 << 16
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGTSTP)


@all_signals()
def run_job(
    job: Launch,
    environ: Mapping[str, str] | None = None,
    server: ForkServer | None = None,
    modules: Sequence[str] = (),
    owner: Owner | None = None,
) -> int:
    """Run the ranks of this host to their end.

    In the main thread it handles signals while it runs: SIGINT, SIGTERM and SIGHUP are passed on to the ranks, and SIGUSR1 to those that have a
    use for it. In another thread, signals stay with the program.

    Parameters
    ----------
    job
        What to run.
    environ
        The variables that the ranks inherit, by default those of this process.
    server
        What forks the ranks, where it was started for this job already; closed at the end.
    modules
        What it is to import beside what every rank needs.
    owner
        The program that the job runs in; None if the process is the job's launcher and nothing else.

    Returns
    -------
    int
        The exit code: 0 when all ranks ended well, or where the job keeps going all that were left, else that of the rank that failed
        first, 128 + n where signal n ended it or the launcher. When it returns, or raises, no process of the job is left on this host.

    Raises
    ------
    UsageError, ConfigError, RendezvousError
        The job cannot be started; see `Launch.validate` and `arrange_meeting`.
    """
    environ = dict(os.environ if environ is None else environ)
    with ExitStack() as cleanup:
        job.validate(environ)
        environ = with_hash_seed(environ)
        shared = shared_variables(job.ranks, environ)
        if server is None and job.fork:
            server = fork_server(job.target, job.is_module, shared)
        if server is not None:
            cleanup.callback(server.close)
        meeting = arrange_meeting(job, environ, None if owner is None else owner.listener)
        if meeting.listener is not None:
            cleanup.callback(meeting.listener.close)
        guard = cleanup.enter_context(guarded())
        reason = why_no_fork(job.target, job.is_module, shared) if server is None else server.prepare(modules)
        if reason:
            server = None
        if reason and job.fork and job.verbose:
            sys.stderr.write(f"oneaccord run: each rank begins as a Python of its own: {reason}\n")
        launcher = cleanup.enter_context(_Launcher(job, guard, server, owner))
        launcher.start(meeting, environ)
        return launcher.wait()


class _Launcher:
    """The ranks of one host, from their start to their end."""

    def __init__(self, job: Launch, guard: Guard, server: ForkServer | None, owner: Owner | None) -> None:
        self._job = job
        self._owner = owner
        self._server = server
        self._guard = guard
        self._screens = screens(1, 2) if owner is None else owner.screens
        for screen in self._screens:
            screen.wait = self._wait_to_write
        self._selector = selectors.DefaultSelector()
        self._input = StandardInput(job.reader, self._selector)
        self._logs: Logs | None = None
        self._children: list[Child] = []
        self._streams: set[Stream] = set()
        self._to_send: deque[tuple[float, signal.Signals | None]] = deque()
        """Signals that the ranks will get, each with its time, unless they end before; None says which ranks are waited for."""
        self._stop_s = _STOP_S if job.grace_s is None else job.grace_s
        setting = of_setting("recorder", "directory")
        self._records = job.environ.get(setting, os.environ.get(setting))
        self._recorded_before = files_of_recorders(self._records) if self._records else set()
        """What other jobs have left in the folder."""
        self._told_to_end: signal.Signals | None = None
        """What ended the job from outside."""
        self._cleanup = ExitStack()
        self._elastic = Elastic(job, guard.folder, self._children) if job.is_elastic else None
        self._is_alone = (owner is None or owner.is_alone) and threading.current_thread() is threading.main_thread()
        """Whether the process has no other purpose: then it hears of all its children, and of those of ranks that end."""
        self._left: dict[Child, set[Left]] = {}
        """What ranks that have ended well have left running, as it was seen last. They are released when nothing is left."""

    def __enter__(self) -> Self:
        self._cleanup.enter_context(self._selector)
        self._cleanup.callback(self._input.close)
        self._orphans = Orphans((each.pid for each in (self._guard, self._server) if each is not None), adopts=self._is_alone)
        self._cleanup.callback(self._orphans.close)
        handled = nullcontext(self._owner.signals) if self._owner is not None else signals_as_bytes(_PASSED_ON)
        self._signals = self._cleanup.enter_context(handled)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        if self._server is not None:
            self._selector.register(self._server, selectors.EVENT_READ, self._on_news)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for child in self._running():
            self._signal(child, signal.SIGKILL)
            child.process.wait()
            self._forget(child)
        for child in self._left:
            self._forget(child)
        if kind is not None or self._is_ended_early():
            self._orphans.kill()
        for child in self._children:
            for pipe in (child.process.stdout, child.process.stderr):
                if pipe is not None:
                    pipe.close()
        self._cleanup.close()

    def start(self, meeting: MeetingPlace, environ: Mapping[str, str]) -> None:
        """Start all ranks, and the spares of an elastic job."""
        job = self._job
        self._meeting, self._environ = meeting, environ
        first = job.local_ranks[0]
        if job.log_dir is not None:
            self._logs = Logs(job.log_dir, range(first, first + job.ranks + job.spares), self._say)
        if self._elastic is not None:
            self._elastic.enroll(job.ranks + job.spares)
        for local_rank in range(job.ranks + job.spares):
            try:
                self._begin(local_rank, is_newcomer=local_rank >= job.ranks)
            except OSError as error:
                raise UsageError(
                    f"rank {job.local_ranks[0] + local_rank} of {job.world_size} could not be started: {error}; start fewer ranks, or raise the "
                    "limits of this host (ulimit -n, ulimit -u)"
                ) from error
        self._input.start()
        if meeting.listener is not None and not job.is_elastic:
            # Rank 0 holds it now. Were it open here too, connections would still be taken, and never answered, after rank 0's end.
            meeting.listener.close()

    def _begin(self, local_rank: int, *, is_newcomer: bool) -> None:
        """Start one rank."""
        job, meeting = self._job, self._meeting
        rank = job.local_ranks.start + local_rank
        path = self._guard.folder / f"rank-{len(self._children)}.json"
        elastic = {} if self._elastic is None else self._elastic.variables(rank, is_newcomer=is_newcomer)
        variables = meeting.variables(job, local_rank, self._environ, elastic) | {Variable.ERROR_FILE: str(path)}
        holds = meeting.listener is not None and (rank == 0 or job.is_elastic)
        handed_over = (meeting.listener.fileno(),) if holds and meeting.listener is not None else ()
        logs = (None, None) if self._logs is None else self._logs.begin(rank)
        process = self._process(rank, variables, handed_over, local_rank)
        self._orphans.ours.add(process.pid)
        self._guard.add(process.pid)
        digits = len(str(max(job.world_size, job.most) - 1))
        prefix = f"[{rank:>{digits}}] ".encode() if job.prefix else b""
        assert process.stdout is not None
        assert process.stderr is not None
        self._read(process.stdout, Stream(self._screens[0], 1, prefix, _PATIENCE_S, logs[0]))
        stderr = Stream(self._screens[1], 2, prefix, _PATIENCE_S, logs[1])
        self._read(process.stderr, stderr)
        self._children.append(Child(rank, process, path, stderr, is_newcomer))

    def _process(
        self, rank: int, variables: Mapping[str, str], handed_over: tuple[int, ...], local_rank: int
    ) -> Spawned | ForkedRank:
        """Start a process, by the server where it can.

        A session of its own, and so a process group: signals reach the rank's own children as well, and the terminal's Ctrl-C reaches the
        launcher alone, which passes it on once.
        """
        job = self._job
        given = self._owner.stdin[local_rank] if self._owner is not None and self._owner.stdin is not None else None
        with self._input.of(rank) if given is None else nullcontext(given.fileno()) as stdin:
            if self._server is not None and self._server.open:
                forked = self._server.fork(job.words, variables, stdin, handed_over)
                if forked is not None:
                    return forked
            return Spawned(job.command(), variables, stdin, handed_over)

    def wait(self) -> int:
        """Pass on output and signals until all ranks have ended; return the exit code."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # streams of any kind, or none: no job ends because of them
                stream.flush()
        self._reap()  # who ended while others were still started
        while self._running():
            self._step()
        self._to_send.clear()
        self._wait_for_what_is_left()
        self._wait_for_daemons()
        until = time.monotonic() + _DRAIN_S
        while self._streams and time.monotonic() < until:
            self._step(until)
        for stream in list(self._streams):
            stream.close()
        code = self._conclude()
        for screen in self._screens:
            screen.tell_of_lost()
        if code and self._records:
            is_new = bool(files_of_recorders(self._records) - self._recorded_before)
            self._say(report_records(self._records, is_new))
        return code

    def _wait_for_what_is_left(self) -> None:
        """Let what ranks that ended well have started, and left running, come to its end; end it if that takes too long."""
        began = time.monotonic()
        tell_at, until, number = began + _GRACE_S, began + self._stop_s, signal.SIGTERM
        while left := self._look_at_what_is_left():
            now = time.monotonic()
            found = sorted((each for some in left.values() for each in some), key=lambda each: each.process)
            what = ", ".join(map(str, found))
            if number == signal.SIGTERM and (now >= until or self._is_ended_early()):
                if self._told_to_end is None and now >= until:
                    self._say(f"oneaccord run: ended what ranks had left running: {what}\n")
                for child in left:
                    signal_group(child.process.pid, number)
                until, number = now + _END_S, signal.SIGKILL
            elif now >= until:
                return  # and what is still there is killed
            elif now >= tell_at and self._told_to_end is None:
                ranks = show_ranks(child.rank for child in left)
                self._say(
                    f"oneaccord run: {ranks} ended and left processes running, which may take {self._stop_s:g} s to end (--grace): {what}\n"
                )
                tell_at = until + _END_S
            self._step(now + _LOOK_S)

    def _look_at_what_is_left(self) -> Mapping[Child, set[Left]]:
        """Return what ranks have left running."""
        for child in list(self._left):
            self._left[child] = self._left_by(child)
            if not self._left[child]:
                del self._left[child]
                self._forget(child)
        return self._left

    def _left_by(self, child: Child) -> set[Left]:
        """Return what a rank that has ended has left in its group. What lives on without it is an orphan, or descends from one."""
        return left_in_group(child.process.pid) if self._orphans.reap() or not self._orphans.are_of_ranks else set()

    def _wait_for_daemons(self) -> None:
        """After a failure or a signal, end what has left the groups of the ranks; after a good end, say what goes on."""
        is_early, asked = self._is_ended_early(), set[int]()
        until = time.monotonic() + (_END_S if is_early else _GRACE_S)
        while (found := self._orphans.reap()) and time.monotonic() < until:
            if is_early:
                self._orphans.signal(found - asked, signal.SIGTERM)
            asked |= found
            self._step(time.monotonic() + _LOOK_S)
        if found and not self._is_ended_early():
            names = ", ".join(str(name_of(each)) for each in sorted(found))
            self._say(f"oneaccord run: daemons that ranks have started go on: {names}\n")

    def _is_ended_early(self) -> bool:
        return self._told_to_end is not None or any(child.has_failed for child in self._children)

    def _step(self, until: float | None = None) -> None:
        """Wait for the next thing to happen, or for the time ``until``, and deal with it."""
        due = [stream.show_at for stream in self._streams if stream.show_at is not None]
        due += [at for at, _ in list(self._to_send)[:1]]
        due += [until] if until is not None else []
        if not self._is_alone and self._running():
            due.append(time.monotonic() + _LOOK_S)  # no signal says that a child has ended
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, Stream):
                self._on_output(cast("IO[bytes]", key.fileobj), key.data)
            else:
                key.data()
        now = time.monotonic()
        for stream in self._streams:
            if stream.show_at is not None and stream.show_at <= now:
                stream.show()
        if any(screen.broken for screen in self._screens) and self._told_to_end is None:
            # Nobody reads any more, as in `oneaccord run ... | head`: end as other programs do.
            self._end_from_outside(signal.SIGPIPE)
        self._send_what_is_due()
        if not self._is_alone:
            self._reap()

    def _send_what_is_due(self) -> None:
        while self._to_send and self._to_send[0][0] <= time.monotonic():
            _, number = self._to_send.popleft()
            if number is not None:
                for child in self._running():
                    self._signal(child, number)
            elif self._running():
                self._tell_of_the_slow()

    def _wait_to_write(self, fd: int) -> bool:
        """Serve signals while whoever reads the output is slow; False when nobody should be waited for any more."""
        if self._told_to_end is not None and not self._running():
            return False
        timeout = max(0.0, self._to_send[0][0] - time.monotonic()) if self._to_send else None
        served = {self._signals.fileno(): self._on_signals}
        if self._server is not None and self._server.open:
            served[self._server.fileno()] = self._on_news
        for each in select.select(list(served), [fd], [], timeout)[0]:
            served[each]()
        self._send_what_is_due()
        return True

    def _read(self, pipe: IO[bytes], stream: Stream) -> None:
        self._streams.add(stream)
        self._selector.register(pipe, selectors.EVENT_READ, stream)

    def _on_output(self, pipe: IO[bytes], stream: Stream) -> None:
        data = os.read(pipe.fileno(), _READ_BYTES)
        if data:
            stream.feed(data)
        else:
            self._selector.unregister(pipe)
            pipe.close()  # an elastic job may have any number of ranks, one after the other
            self._streams.discard(stream)
            stream.close()

    def _on_signals(self) -> None:
        try:
            numbers = self._signals.recv(4096)
        except BlockingIOError:  # served already, while a slow reader was waited for
            return
        for number in numbers:
            if number == 0:
                self._show_all()
            elif number == signal.SIGCHLD:
                self._reap()
            elif number == signal.SIGUSR1:
                self._pass_on_to_handlers(signal.SIGUSR1)
            elif number == signal.SIGTSTP:
                self._stand_still()
            else:
                self._end_from_outside(signal.Signals(number))

    def _show_all(self) -> None:
        """Show what ranks have written by now, and tell the owner."""
        until = time.monotonic() + _DRAIN_S  # a rank may write on and on
        while ready := [key for key, _ in self._selector.select(0) if isinstance(key.data, Stream)]:
            for key in ready:
                self._on_output(cast("IO[bytes]", key.fileobj), key.data)
            if time.monotonic() >= until:
                break
        assert self._owner is not None
        if self._owner.shown is not None:
            self._owner.shown()

    def _renew_guard(self) -> None:
        """Start another guard where somebody has killed it."""
        problem = self._guard.renew()
        self._orphans.ours.add(self._guard.pid)
        if problem:
            self._say(f"oneaccord run: the guard was killed; if this is killed too, ranks may stay ({problem})\n")

    def _on_news(self) -> None:
        """Hear of ranks that were forked."""
        assert self._server is not None
        if self._server.open:
            self._server.read()
        if not self._server.open:
            with suppress(KeyError):
                self._selector.unregister(self._server)
        self._reap()

    def _pass_on_to_handlers(self, number: signal.Signals) -> None:
        """Pass a signal on to the ranks that have a handler for it; it would end the others, such as one that is still beginning."""
        told = [child for child in self._running() if error_file.catches(child.process.pid, number)]
        for child in told:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child.process.pid, number)
        whom = f"was passed on to {len(told)} of {len(self._running())} running ranks" if told else "is handled by no rank"
        self._say(f"oneaccord run: {number.name} {whom}\n")

    def _stand_still(self) -> None:
        """Stop the ranks and this process, as Ctrl-Z does, until something continues this process."""
        # Sessions without a terminal ignore SIGTSTP.
        stopped = [child for child in self._running() if not is_stopped(child.process.pid)]
        for child in stopped:
            signal_group(child.process.pid, signal.SIGSTOP)
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        pause = time.monotonic() - began
        self._to_send = deque((at + pause, number) for at, number in self._to_send)
        for child in stopped:
            signal_group(child.process.pid, signal.SIGCONT)

    def _end_from_outside(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._told_to_end is not None and number == signal.SIGINT:
            self._to_send = deque([(now, signal.SIGKILL)])
        elif self._told_to_end is None:
            self._told_to_end = number
            # Where a rank has failed, the others are to be killed soon, and no later for this.
            kills = [at for at, each in self._to_send if each == signal.SIGKILL]
            if number == signal.SIGPIPE:
                self._to_send = deque([(now, signal.SIGTERM), (now + _END_S, signal.SIGKILL)])
                return
            self._to_send = deque([(now, number), (min([*kills, now + self._stop_s]), signal.SIGKILL)])
            if self._stop_s > _GRACE_S and not kills:
                self._to_send.insert(1, (now + _GRACE_S, None))

    def _tell_of_the_slow(self) -> None:
        """Say which ranks have not ended yet, and until when they may."""
        assert self._told_to_end is not None
        ranks = show_ranks(child.rank for child in self._running())
        self._say(
            f"oneaccord run: {self._told_to_end.name} was passed on at once, and {ranks} may take {self._stop_s:g} s in all to end (--grace); "
            "Ctrl-C kills what is left\n"
        )

    def _reap(self) -> None:
        self._renew_guard()
        self._orphans.reap()
        ended = []
        for child in self._running():
            if child.process.poll() is not None:
                child.exited_at = time.monotonic()
                found = self._left_by(child) if child.process.returncode == 0 and not child.signalled else None
                if found:
                    self._left[child] = found
                else:
                    self._forget(child)
                ended.append(child)
                if self._owner is not None:
                    self._owner.ended(child.failure())
                if not self._job.is_elastic:
                    error_file.mark_gone(child.error_file, child.rank, child.failure().how)
        if ended:
            self._look_at_what_is_left()
        elastic = self._elastic
        members = [] if elastic is None or not ended else elastic.take_leave(ended)
        for child in ended:
            if (
                child.process.returncode != 0
                and not child.signalled
                and not self._to_send
                and not self._survives(child, was_member=child in members)
            ):
                self._end_soon([], _GRACE_S)
        if ended and elastic is not None:
            elastic.enroll(len(self._running()))
            if not self._to_send and (needless := elastic.needless()):
                self._end_soon(needless, 0.0)
            self._reap()  # who starts a rank may hear of others that have ended
        self._tell_of_the_stopped()

    def _end_soon(self, needless: Sequence[Child], grace_s: float) -> None:
        """Let all ranks end that still run after a while."""
        for child in needless:
            child.needless = True
        at = time.monotonic() + grace_s
        self._to_send.extend([(at, signal.SIGTERM), (at + _END_S, signal.SIGKILL)])

    def _survives(self, failed: Child, *, was_member: bool) -> bool:
        """Return whether the others continue without a rank that has failed; start another one in its place, if that is to be."""
        if self._elastic is None:
            return self._job.keep_going
        if not self._elastic.continues():
            return False
        failed.made_good = not was_member
        if restart := self._elastic.restart(failed, was_member=was_member):
            self._say(restart)
            try:
                self._begin(failed.rank - self._job.local_ranks[0], is_newcomer=True)
                failed.made_good = True
            except OSError as error:
                self._say(f"oneaccord run: it could not be started: {error}\n")
        return True

    def _tell_of_the_stopped(self) -> None:
        """Say which ranks stand still where no others are left: nobody ends them, and nothing else tells why the job does not end."""
        running = self._running()
        may_go_on = self._job.keep_going or self._job.is_elastic
        if not may_go_on or len(running) == len(self._children) or not all(is_stopped(child.process.pid) for child in running):
            return
        for child in running:
            if not child.told:
                child.told = True
                pid = child.process.pid
                self._say(
                    f"oneaccord run: rank {child.rank} is stopped, and no other one runs: kill -CONT {pid}, or kill -KILL {pid}\n"
                )

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.process.returncode is None]

    def _forget(self, child: Child) -> None:
        # What the rank itself started ends here.
        signal_group(child.process.pid, signal.SIGKILL)
        self._guard.remove(child.process.pid)
        child.process.release()
        self._orphans.ours.discard(child.process.pid)

    def _signal(self, child: Child, number: signal.Signals) -> None:
        # To one that has ended and was not reaped yet, the signal does nothing.
        child.signalled = True
        signal_group(child.process.pid, number)

    def _conclude(self) -> int:
        ended = [child.ended() for child in self._children]
        if self._owner is not None:
            if self._owner.concluded is not None:
                self._owner.concluded(ended, self._told_to_end)
            return 0  # it knows how each of them has ended
        text, code = conclude(ended, self._told_to_end, may_go_on=self._job.keep_going or self._job.is_elastic)
        if text:
            self._say(text)
        is_final = code and self._told_to_end is None and not self._job.keep_going and not self._job.is_elastic
        if is_final and error_file.is_elastic(self._guard.folder):
            self._say(
                "oneaccord run: the program has an elastic function; with --max-restarts N, it goes on after a failure, and others come in the places of "
                "ranks that fail\n"
            )
        return code

    def _say(self, text: str) -> None:
        screen = self._screens[1]
        before = "\n" if screen.open_line is not None else ""
        screen.write(2, (before + text).encode(errors="backslashreplace"))
