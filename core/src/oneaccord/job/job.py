"""A rank's membership in a job: how it joins, what it holds, and how it leaves."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from oneaccord.common.checks import is_success, safe_str
from oneaccord.common.lines import line_raised
from oneaccord.common.threads import Thread
from oneaccord.config import Resolved
from oneaccord.config.plugins import PluginManager, checked_kind
from oneaccord.contract.backend import Backend, BackendSpec, Damaged, LinkLost, Transport
from oneaccord.contract.cards import read_cards
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.runtime import Runtime
from oneaccord.control import timing
from oneaccord.control.connection import Control, make_join
from oneaccord.control.failover import Failover
from oneaccord.control.joiners import NEWCOMER_HELLO
from oneaccord.control.meeting import Meeting
from oneaccord.control.protocol import ANOTHER_JOB, Report, Verdict, Welcome
from oneaccord.control.remote import CONTROL_HELLO, SocketControl
from oneaccord.control.store import Store
from oneaccord.errors import AuthenticationError, ClosedError, OneAccordError, PeerLostError, RendezvousError
from oneaccord.job.bootstrap import Maker
from oneaccord.job.no_transport import NoTransport
from oneaccord.net.credentials import Credentials
from oneaccord.net.finding import Search
from oneaccord.net.forking import forget_after_fork
from oneaccord.net.frames import FrameConnection
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.network import Address, Listener, dial, guarded_bind, show_address
from oneaccord.net.proven import ProvenSocket
from oneaccord.runtime.computer import COMPUTER

if TYPE_CHECKING:
    from oneaccord.contract.device import DeviceChannel
    from oneaccord.explain.dump import Dumper
    from oneaccord.job.threads import ThreadRank

__all__ = ["AS_LONG_AS_IT_TAKES_S", "Job", "Part"]

_log = logging.getLogger("oneaccord.job")

T = TypeVar("T")


class Part(Protocol):
    """An object that a job holds one of, without knowing what it does."""

    def close(self) -> Sequence[object]:
        """End, before the backend does; return what must be kept until the device channels are closed."""


P = TypeVar("P", bound=Part)

AS_LONG_AS_IT_TAKES_S = 1e6
_CLOSINGS_S = 10.0
"""The longest time for which the end of a job waits for channels that are being closed: a device library may hang."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a connection whose reason is this rank's own: the peer is not lost."""


class Job:
    """What a rank holds while it belongs to a job.

    Attributes
    ----------
    rank, world_size
        This rank, and the number of all ranks.
    control
        Its control connection.
    backend
        The backend that moves its bytes; None in a world of one, which moves none.
    backend_name
        The name of the configured backend.
    closed_groups
        The numbers of the groups that this rank has closed.
    failure_seen
        Whether the program on this rank has seen how the job failed.
    how_closed, instead
        Why a call after the end is refused, in words, and what to do.
    runtime
        The clock, locks and threads of this rank.
    on_close
        Functions that are called once, when this rank leaves or gives up.
    drains
        Functions that wait for the calls in flight, one for each open group; each returns whether there were none.
    hosts
        For each rank, the number of its host.
    meeting
        How its ranks met, if they are processes.
    device_channels
        The channels that move the device memory of the open groups.
    may_shrink_again
        Whether the job has been retired, and the survivors can still come together.
    """

    def __init__(self, rank: int, world_size: int, backend_name: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.backend_name = backend_name
        self.backend: Backend | None = None
        self.runtime: Runtime = COMPUTER
        self.control: Control
        self.closed: bool = False
        self.may_shrink_again: bool = False
        self.hosts: tuple[int, ...] = ()
        self.meeting: Meeting | None = None
        self._local_rank: int | None = None
        self.drains: list[Callable[[Deadline], bool]] = []
        self.on_close: list[Callable[[], object]] = []
        self._loop: Loop | None = None
        self._store: Store | None = None
        self._standby: Failover | None = None
        self._listeners: list[Listener] = []
        self._credentials = Credentials(b"")
        self._liveness = Liveness()
        self.closed_groups: set[int] = set()
        self.failure_seen: bool = False
        self.how_closed: str = "the group is closed"
        self.instead: str = "make another one with oneaccord.init()"
        self._parts: dict[object, Any] = {}
        self.device_channels: list[DeviceChannel] = []
        self._closings: list[threading.Thread] = []
        self._giving = threading.Lock()
        self._released = False
        self._member: ThreadRank | None = None
        self._dumper: Dumper | None = None

    @classmethod
    def meet(cls, meeting: Meeting, deadline: Deadline) -> Job:
        """Join a job of processes.

        Raises
        ------
        RendezvousError, AuthenticationError, DeadlineError, PeerLostError
            The ranks did not meet; nothing is left open.
        """
        job = cls(meeting.rank, meeting.world_size, meeting.backend)
        job.meeting = meeting
        job._liveness = meeting.liveness
        job._local_rank = meeting.local_rank
        try:
            loop = job.loop
            if meeting.rank == 0:
                job._open_store(meeting, deadline)
            welcome = job._join_store(meeting, deadline)
            control = job.control
            assert isinstance(control, SocketControl)
            job._credentials = meeting.credentials.of_job(welcome.key, welcome.certificates)
            job.hosts = tuple(welcome.hosts)
            if meeting.world_size > 1:
                job._standby = Failover(loop, control, job._credentials, meeting.liveness, meeting.join_address)
        except BaseException as error:
            job._abandon(meeting, error)
            if isinstance(error, RendezvousError) and meeting.gone is not None and (how := meeting.gone().get(0)):
                text = f"rank 0 was lost before the ranks had met: {how}"
                raise PeerLostError(text, rank=meeting.rank, peer=0) from None
            raise
        meeting.before = meeting.keep = None  # or each job would keep the one before it
        atexit.register(job._at_exit)
        forget_after_fork(job)
        return job

    def _join_store(self, meeting: Meeting, deadline: Deadline) -> Welcome:
        """Come to the store, and wait for the others; a store of another job at one of several places is passed by."""
        places = [meeting.address, *meeting.others]
        credentials, liveness = meeting.credentials, meeting.liveness
        join = make_join(meeting.rank, meeting.world_size, meeting.backend, meeting.choices, job=credentials.run)
        search = Search(places, credentials, CONTROL_HELLO, meeting.rank, deadline, meeting.is_vain)
        while True:
            sock, place = search.dial()
            self.control = control = SocketControl(self.loop, join, place, credentials, deadline, liveness, sock=sock)
            try:
                # The store ends the wait for the others, and knows which ranks are missing: this rank's own deadline must come later.
                welcome = control.welcome(Deadline(deadline.remaining() + 2.0))
            except RendezvousError as error:
                if len(places) == 1 or control.verdict is None or control.verdict.kind != ANOTHER_JOB:
                    raise
                control.close()
                search.note(str(error))
            else:
                meeting.address = place
                return welcome

    def _open_store(self, meeting: Meeting, deadline: Deadline) -> None:
        place = meeting.listen(deadline), meeting.credentials, meeting.world_size
        self._store = store = Store(self.loop, *place, deadline, meeting.liveness, meeting.join_address)
        if meeting.before is not None:
            store.follow(*meeting.before)
        if meeting.gone is not None:
            store.look_for(meeting.gone)

    def _abandon(self, meeting: Meeting, error: BaseException) -> None:
        """Release what a failed meeting has made; a store later, so that ranks on their way learn the reason from it."""
        if self._store is not None and meeting.keep is not None:
            meeting.keep(self._release)
            return
        if self._store is not None and isinstance(error, RendezvousError):
            time.sleep(timing.LATECOMERS_S)
        self._release()

    @classmethod
    def at_the_door(cls, meeting: Meeting, most: int, deadline: Deadline) -> Job:
        """Come to a running job of at most ``most`` ranks, and wait at its join address until it lets this rank in.

        The returned job stands for the one that the others leave; `shrink` leads from it to their next one.
        """
        job = cls(-1, most, meeting.backend)
        job.meeting, job._local_rank, job._liveness, job.closed = meeting, meeting.local_rank, meeting.liveness, True
        try:
            join = make_join(-1, most, meeting.backend, meeting.choices, job=meeting.credentials.run)
            job.control = SocketControl(
                job.loop, join, meeting.address, meeting.credentials, deadline, meeting.liveness, hello=NEWCOMER_HELLO
            )
        except BaseException:
            job._release()
            raise
        return job

    @classmethod
    def among_threads(
        cls, member: ThreadRank, backend_name: str, choices: str, deadline: Deadline, local_rank: int | None = None
    ) -> Job:
        """Join a job whose ranks are threads of this process."""
        job = cls(member.rank, member.world.world_size, backend_name)
        job._local_rank = local_rank
        job.runtime = member.world.runtime
        control = job.control = member.next_hub().connect(member.rank, backend_name, choices)
        job._member = member
        member.at_end(job.finish)
        welcome = control.welcome(deadline)
        job._credentials, job.hosts = Credentials(welcome.key), tuple(welcome.hosts)
        forget_after_fork(job)
        return job

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its host, counted from 0; it stays when ranks are renumbered."""
        if self._local_rank is None:
            self._local_rank = self.hosts[: self.rank].count(self.hosts[self.rank])
        return self._local_rank

    def part(self, kind: Callable[[Job], P]) -> P:
        """Return the part of this kind, a class; it is made when first asked for, and lasts as long as the job."""
        if kind not in self._parts:
            self._parts.setdefault(kind, kind(self))  # several threads may come at once: a part that is not taken holds nothing
        part: P = self._parts[kind]
        return part

    @property
    def loop(self) -> Loop:
        """The background loop; started when first needed."""
        if self._loop is None:
            self._loop = Loop(f"oneaccord-{self.rank}", self._crashed)
        return self._loop

    def record(self, calls: int, directory: str | None) -> None:
        """Let the flight recorder keep ``calls`` calls, and write them to a directory; before the first group is made."""
        self.control.recorder.keep(calls)
        if directory is None:
            return
        if self.runtime.is_simulated:
            _log.warning("oneaccord: recorder.directory is not used in a simulated world; its trace tells more")
            return
        from oneaccord.explain.dump import Dumper, job_id  # most jobs write none

        self._dumper = Dumper(self.control, job_id(self._credentials.secret), Path(directory).absolute())

    def start_backend(
        self, spec: BackendSpec, resolved: Resolved, plugins: PluginManager, shared: dict[str, Any] | None, deadline: Deadline
    ) -> None:
        """Make the backend, together with all other ranks.

        Raises
        ------
        PeerLostError
            A rank was lost meanwhile; other errors are the factory's.
        """
        maker = Maker(self, resolved, plugins, shared, deadline)
        try:
            self.backend = maker.make(spec, (spec.name,), tuple(range(self.world_size)))
        except LinkLost as lost:
            text = f"while {spec.name} started the connection of rank {self.rank} to rank {lost.peer} broke ({lost.reason})"
            raise self.fail(Report("lost", text, lost.peer)) from lost
        except Damaged as damaged:
            raise self._garbled(damaged.peer, damaged, f"while {spec.name} started") from None
        self.control.on_failure(self.backend.abort)

    def read_cards(self, cards: Sequence[bytes], kind: type[T], what: str, ranks: Sequence[int] | None = None) -> list[T]:
        """Return the contents of the cards of these ranks, by default all, as `oneaccord.contract.cards.read_cards`.

        Raises
        ------
        ProtocolError
            A card cannot be read; the same on all ranks.
        """
        try:
            return read_cards(cards, kind)
        except Damaged as damaged:
            peer = damaged.peer if ranks is None else ranks[damaged.peer]
            raise self._garbled(peer, damaged, f"in {what}") from None

    def _garbled(self, peer: int, damaged: Damaged, when: str) -> OneAccordError:
        text = f"rank {peer} sent something that is no oneaccord message {when}: {damaged.reason}"
        return self.fail(Report("protocol", text, peer))

    def open_transport(self, channel: int) -> Transport:
        """Return the backend's transport for a channel."""
        if self.backend is None or self.world_size == 1:
            return NoTransport()
        return checked_kind(
            self.backend.open_transport(channel), Transport, f"open_transport() of the backend {self.backend_name!r}"
        )

    def open_barrier(self, channel: int) -> Transport | None:
        """Return the backend's transport for the barriers of a channel; None if it has no other one."""
        transport = None if self.backend is None or self.world_size == 1 else self.backend.open_barrier(channel)
        return (
            None
            if transport is None
            else checked_kind(transport, Transport, f"open_barrier() of the backend {self.backend_name!r}")
        )

    def fail(self, report: Report) -> OneAccordError:
        """Report a failure that this rank has found; return the first cause, on which all ranks agree, to be raised."""
        return self.control.report(report)

    def error(self) -> OneAccordError:
        """Return the first cause of the job's failure, to be raised."""
        return self.control.error()

    def closed_error(self, what: str = "", operation: str | None = None, sequence: int | None = None) -> ClosedError:
        """Return the error of a call after the end; ``what`` is the call in words."""
        text = f"{self.how_closed}{what}; {self.instead}"
        return ClosedError(text, rank=self.rank, operation=operation, sequence=sequence)

    def close(self, deadline: Deadline) -> None:
        """Leave: wait for the calls in flight and for every rank to leave, until the deadline; then release all.

        If the others need longer, rank 0's process keeps their control connections in the background.

        Raises
        ------
        CommError
            The job had failed, and no call on this rank has raised the reason yet.
        """
        if self.closed:
            self._give_up_shrinking()
            return
        if not self.control.failed:
            # The callback of a call may start another call: repeat until there is nothing to wait for.
            idle = False
            while not idle and not deadline.passed():
                waits = [drain(deadline) for drain in list(self.drains)]
                idle = all(waits)
        self._end()
        all_left = True
        try:
            if not self.control.failed:
                all_left = self.control.leave(deadline)
            elif not self.failure_seen:
                raise self.error()
        finally:
            if all_left or self._store is None or self.control.failed:
                self._release()
            else:
                self._release_backend()
                self._store.when_alone(self._release)

    def _end(self) -> None:
        """Refuse calls from now on."""
        self.closed = True
        while self.on_close:
            self.on_close.pop()()

    def retire(self) -> None:
        """Refuse calls after a failure, and release what moved the bytes; the control connection stays."""
        self.closed = True
        try:
            self._release_backend()
        except BaseException:
            if self._standby is not None:
                self._standby.step_back()
            self.control.close()  # the others need not wait for a rank that cannot continue
            raise

    def release(self) -> None:
        """Release what `retire` has kept."""
        self._release()

    def _give_up_shrinking(self) -> None:
        """Release what `retire` and a failed shrink() have kept."""
        if self.may_shrink_again:
            self.may_shrink_again = False
            self.how_closed, self.instead = "the group is closed", "make another one with oneaccord.init()"
            self._release()

    def abort(self, error: BaseException) -> None:
        """Leave because this rank's program has failed; the other ranks that wait learn so."""
        if self.closed:
            self._give_up_shrinking()
            return
        self._end()
        if not self.control.failed:
            self.control.raised = line_raised(error)
            words = safe_str(error).strip().splitlines()
            cause = f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
            self.control.report(Report("aborted", f"rank {self.rank} ended with {cause}", peer=self.rank))
        self._release()

    def finish(self, error: BaseException | None) -> None:
        """Leave as the program ends, if it has not closed its group itself."""
        if error is not None and not is_success(error):
            self.abort(error)
        else:
            self.close(Deadline(5.0, self.runtime.now))

    def let_more_come(self) -> None:
        """Let newcomers in without a failure; all ranks may call this."""
        if self._store is not None:
            self._store.let_more_come()

    def after_fork(self) -> None:
        """Forget a parent's job in a forked child, and leave alone what the parent still uses."""
        self.closed = True
        self.how_closed = "this process inherited the group over a fork, and it belongs to the process that forked"
        self.instead = (
            "call it there, and let the two exchange what they need by a pipe or a queue; if the child must not inherit it, start it "
            'by multiprocessing.get_context("spawn") or subprocess, and start ranks by oneaccord run'
        )
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        # The interpreter is ending: no caller is left that could catch an error, and new threads may be refused.
        with contextlib.suppress(OneAccordError, RuntimeError):
            self.finish(error)
        if self._store is not None and not self._released:
            _log.warning("oneaccord: rank 0 has finished, and its process stays until the other ranks have left as well")
            self._store.stay()

    def close_channel(self, channel: DeviceChannel, before: Callable[[], None]) -> None:
        """Close the channel of a closed group in the background, after ``before()``; nothing if the job is being released.

        The caller may be the thread of the control connection, and libraries take their time.
        """

        def close() -> None:
            before()
            channel.close()

        with self._giving:
            if channel not in self.device_channels:
                return
            self.device_channels.remove(channel)
            closing = Thread(target=close, name="oneaccord-gpus-close", daemon=True)
            with contextlib.suppress(RuntimeError):
                closing.start()
                self._closings = [*(each for each in self._closings if each.is_alive()), closing]
                return
        channel.close()  # the interpreter is ending

    def _crashed(self, error: Exception) -> None:
        if hasattr(self, "control"):
            self.control.fail(Verdict("internal", f"the background thread of rank {self.rank} failed: {error!r}", self.rank))

    def _release_backend(self) -> None:
        with contextlib.ExitStack() as at_end:  # an error of one of them does not keep the others from closing
            for listener in self._listeners:
                at_end.callback(listener.close)
            if self.backend is not None:
                at_end.callback(self.backend.close)
                at_end.callback(self.backend.abort)
            kept = [each for part in self._parts.values() for each in part.close()]
            with self._giving:
                channels, self.device_channels = self.device_channels, []
                closings, self._closings = self._closings, []
            has_failed = hasattr(self, "control") and self.control.failed
            if not has_failed:
                deadline = Deadline(_CLOSINGS_S)
                for closing in closings:  # else the backend would abort what they close
                    closing.join(deadline.remaining())
                _close_all(channels, kept)
        if has_failed and channels:
            # An aborted channel may close slowly, or hang; the process need not wait for that.
            with contextlib.suppress(RuntimeError):
                Thread(target=_close_all, args=(channels, kept), name="oneaccord-gpus-close", daemon=True).start()

    def _release(self) -> None:
        """Release everything, in an order in which the last messages are still sent."""
        self._released = True
        if self._standby is not None:
            self._standby.end()
        atexit.unregister(self._at_exit)
        if self._dumper is not None:
            self._dumper.close()
        if self._member is not None:
            self._member.not_at_end(self.finish)
        try:
            self._release_backend()
        finally:  # the backend may be a third party's, and raise
            for store in (self._store, self._standby):
                if store is not None:
                    store.drain(1.0)
            if self._standby is not None:
                self._standby.step_back()
            if hasattr(self, "control"):
                self.control.close()
            for store in (self._store, self._standby):
                if store is not None:
                    store.close()
            if self._loop is not None:
                self._loop.stop()

    def listen(self, host: str, accept: Callable[[socket.socket, bytes], None], whom: str) -> Address:
        """Listen on a free port for ranks of this job that dial ``whom``."""

        def watched(sock: socket.socket, hello: bytes) -> None:
            with contextlib.suppress(OSError):  # it has ended, as its first use will show
                self._liveness.watch(sock)
            accept(sock, hello)

        sock = guarded_bind((host, 0), self._credentials)
        address = sock.getsockname()
        self._listeners.append(Listener(self.loop, sock, self._credentials.towards(whom), watched))
        return address[0], address[1]

    def is_from(self, sock: socket.socket, rank: int) -> bool:
        """Return whether a connection that came may be a rank's."""
        return not isinstance(sock, ProvenSocket) or self._credentials.is_from(sock, rank)

    def frames(
        self, sock: socket.socket, on_frame: Callable[[bytes | None], None], on_lost: Callable[[str], None], max_bytes: int
    ) -> FrameConnection:
        """Return a `FrameConnection` over a socket of `listen` or `dial`, which owns it from now on."""
        assert isinstance(sock, ProvenSocket)
        return FrameConnection(self.loop, sock, on_frame, on_lost, max_bytes, self._liveness)

    def key_for(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose that only the ranks of this job know."""
        return self._credentials.towards(purpose).secret

    def dial(
        self, peer: int, address: Address, hello: bytes, deadline: Deadline, whom: str, rank: int | None = None
    ) -> socket.socket:
        """Connect to a ``rank`` of this job that listens as ``whom``; ``peer`` is its number in the backend that dials."""
        try:
            sock = self._dial(address, hello, deadline, self._credentials.towards(whom, rank))
            with contextlib.suppress(OSError):  # it has ended, as its first use will show
                self._liveness.watch(sock)
            return sock
        except TimeoutError:
            raise
        except AuthenticationError as error:
            reason = f"the process at {show_address(address)} is not {whom} of this job: connections are redirected, or another process listens there"
            raise LinkLost(peer, reason) from error
        except OSError as error:
            if error.errno in _EXHAUSTED:
                hint = f"{error.strerror}: close the groups that are done, or raise the limit (`ulimit -n`)"
                raise OSError(error.errno, hint) from error
            raise LinkLost(peer, f"{show_address(address)}: {error.strerror or error}") from error

    def _dial(self, address: Address, hello: bytes, deadline: Deadline, credentials: Credentials) -> socket.socket:
        """Connect, again and again: a listener with too many strangers drops some. If it has died, the next attempt is refused."""

        def cancelled() -> bool:
            return self.closed or self.control.failed

        while True:
            try:
                return dial(address, credentials, hello, deadline, cancelled)
            except ConnectionResetError:
                if cancelled():
                    raise
                if deadline.passed():
                    raise TimeoutError(f"{show_address(address)} breaks every connection") from None
                time.sleep(min(0.05, deadline.remaining()))


def _close_all(channels: list[DeviceChannel], kept: list[object]) -> None:
    """Close channels, and keep until then the memory to which their devices may still write."""
    for channel in channels:
        channel.close()
    kept.clear()
