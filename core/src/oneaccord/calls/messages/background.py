"""Messages without tags in the background: no thread runs one.

A message begins when the turn of its direction comes, in the thread that issues it or that gives the turn, and goes as far as it can without waiting.
What is left is moved by a thread that waits for such a message; it *drives*, for all messages of the group. While no thread waits, one thread of core
drives. It begins when it is first needed, gives way to every thread that waits, and sleeps when there is nothing to do. As in
`oneaccord.calls.post.office`, a driver is interrupted when there is something new to wait for.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Protocol

from oneaccord.arrays.memory import Array
from oneaccord.calls.engine.waiting import Overdue, checked_wait
from oneaccord.calls.failures import again, guarded
from oneaccord.calls.messages.fast import CachedRecv, CachedSend
from oneaccord.calls.messages.point_to_point import (
    AT_BEGINNING,
    OPENED,
    OPENING_BYTES,
    DescriptionMismatch,
    Incoming,
    Mover,
    Outgoing,
)
from oneaccord.calls.observed import Observation
from oneaccord.calls.order.call_sequence import CallSequence, Direction
from oneaccord.calls.order.turns import Entry, Turns
from oneaccord.calls.request import ARRAY
from oneaccord.calls.work import Work
from oneaccord.common.threads import Thread
from oneaccord.config.plugins import PluginManager
from oneaccord.contract.backend import LinkLost, Mailbox, Transfer, Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import CallSignature
from oneaccord.contract.runtime import Place
from oneaccord.control.recorder import Record
from oneaccord.errors import UsageError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["Background", "MessageWork"]

_FIRST_STALL_S, _NEXT_STALL_S = 0.2, 0.5
_PAUSE_S = 5e-4
"""How long the thread of core leaves the messages to the threads of the program, which may be about to wait for them."""
_LINGERS = 50
_IDLE_S = 2.0
_DRIVES_S = 0.05
_SLICE_S = 2e-3
"""How long a driver waits at most if the transport cannot be interrupted and others may have something new."""
_END_S = 1.0


class Path(Protocol):
    """The path of a group's messages, as far as it serves those in the background; `oneaccord.calls.messages.actions.MessagePath`."""

    job: Job
    members: Members
    call_sequence: CallSequence

    def outgoing(self, direction: Direction, number: int, array: Array, signature: CallSignature = ARRAY) -> Outgoing:
        """Return a message that goes to a direction."""
        ...

    def incoming(self, direction: Direction, number: int, out: Array | None, signature: CallSignature = ARRAY) -> Incoming:
        """Return a message that comes from a direction."""
        ...

    def mismatch(self, problem: DescriptionMismatch, what: object) -> BaseException:
        """Return the error of a message that does not fit, which ends the job."""
        ...


class MessageWork(Work[Any], Entry):
    """The handle of a message in the background.

    Parameters
    ----------
    background
        Moves it.
    what
        The call in words: an object that makes them on demand.
    direction, array, signature, seconds
        Its direction, the sent array or the memory for the received one, its kind, and how long it may last.
    turns, on_failure_seen
        As for `Work`.
    make
        Returns the caller's result, of the array that has come; None if it is that.
    fast
        The fast way of a receive, if it has one.
    """

    __slots__ = (
        "_background",
        "array",
        "came",
        "deadline",
        "direction",
        "fast",
        "make",
        "number",
        "observation",
        "record",
        "seconds",
        "signature",
        "steps",
        "transfer",
        "words",
    )

    def __init__(
        self,
        background: Background,
        what: object,
        direction: Direction,
        array: Array | None,
        signature: CallSignature,
        seconds: float,
        turns: Turns,
        on_failure_seen: Callable[[], None],
        make: Callable[[Array | None], Any] | None,
        fast: CachedRecv | None,
    ) -> None:
        super().__init__("", turns, on_failure_seen)
        self._background = background
        self.words: object = what
        self.direction: Direction = direction
        self.array: Array | None = array
        self.signature: CallSignature = signature
        self.seconds: float = seconds
        self.make: Callable[[Array | None], Any] | None = make
        self.fast: CachedRecv | None = fast
        self.came: Array | None = None
        self.number: int = -1
        self.deadline: float = math.inf
        self.steps: Iterator[Transfer] | None = None
        self.transfer: Transfer | None = None
        self.record: Record | None = None
        self.observation: Observation | None = None

    @property
    def _what(self) -> str:
        return str(self.words)

    @_what.setter
    def _what(self, value: str) -> None:
        pass

    def has_ended(self) -> bool:
        """Return whether it has ended."""
        return self._ended

    def admit(self) -> None:
        """As `Entry.admit`."""
        self._background.admit(self)

    def done(self) -> bool:
        """As for `Work`; moves what can be moved now."""
        if not self._ended:
            self._check_process()
            self._background.poll()
        return super().done()

    def end(self, result: Any, error: BaseException | None) -> None:
        """Let those continue that wait for it; under the lock of the background."""
        self._result, self._error = result, error
        self._trace = None if error is None else error.__traceback__
        self.array = self.came = self.steps = self.transfer = None
        self._conclude()

    def _ends_by(self, deadline: Deadline | None) -> bool:
        self._check_process()
        self._background.wait(self, deadline)
        return self._ended

    def _expect_end(self) -> None:
        self._background.poll()


class Backgrounds:
    """Those of all groups of a rank that are open; a part of its job, which ends their threads.

    Parameters
    ----------
    job
        The job.

    Attributes
    ----------
    those
        They.
    """

    def __init__(self, job: Job) -> None:
        self.those: set[Background] = set()

    def close(self) -> Sequence[object]:
        """End their threads; return what must be kept."""
        for each in list(self.those):
            each.close()
        return ()


class Background:
    """The messages in the background of one group.

    Parameters
    ----------
    path, transport, boxes
        The path of the group's messages, its transport, and the mailboxes of the peers that are connected.
    plugins
        The observers.
    """

    def __init__(self, path: Path, transport: Transport, boxes: dict[int, Mailbox], plugins: PluginManager) -> None:
        self._path = path
        self._job = path.job
        self._transport = transport
        self._mover = Mover(transport, boxes)
        self._plugins = plugins
        self._lock = threading.RLock()
        self._new: deque[MessageWork] = deque()
        self._active: dict[MessageWork, None] = {}
        self._broken: list[tuple[MessageWork, BaseException]] = []
        self._openings: dict[int, memoryview] = {}
        self._is_sorting = False
        self._driver: int | None = None
        self._parked: dict[Place, MessageWork] = {}
        self._slice_s = math.inf
        self._has_more = False
        self._begun = 0
        self._helper: threading.Thread | None = None
        self._bell = threading.Event()
        self._is_over = False
        self._job.part(Backgrounds).those.add(self)

    # A message begins

    def submit(self, work: MessageWork) -> None:
        """Begin a message now, or when the turn of its direction comes."""
        if work.direction.counters.take((work, None)):
            self.admit(work)

    def begin(
        self,
        fast: CachedSend | CachedRecv,
        array: Array,
        out: Array | None,
        seconds: float,
        turns: Turns,
        on_failure_seen: Callable[[], None],
    ) -> Work[Any]:
        """Begin a message that fits a fast way now, or when its turn comes; return its handle."""
        if isinstance(fast, CachedSend):
            sent = self._send_now(fast, array, seconds, turns, on_failure_seen)
            if sent is not None:
                return sent
            work = MessageWork(self, fast.what, fast.turns, array, ARRAY, seconds, turns, on_failure_seen, None, None)
            self.submit(work)
            return work
        direction = fast.turns
        work = MessageWork(self, fast.what, direction, out, ARRAY, seconds, turns, on_failure_seen, None, fast)
        number = direction.enter(fast.what)
        if number < 0:
            self.submit(work)
            return work
        work.number = number
        work.deadline = direction.counters.started + seconds
        with self._lock:
            self._active[work] = None
            self._begun += 1
            if self._driver is not None or self._helper is None or self._parked or not self._bell.is_set():
                self._call_driver()
        return work

    def _send_now(
        self, fast: CachedSend, array: Array, seconds: float, turns: Turns, on_failure_seen: Callable[[], None]
    ) -> Work[Any] | None:
        """Send a short array whose kind is known, if its turn is now; return its handle, which has ended unless the message must wait."""
        direction, words = fast.turns, fast.what
        if not fast.is_short or fast.is_stale:
            return None
        number = direction.enter(words)
        if number < 0:
            return None
        transfer: Transfer | None = None
        error: BaseException | None = None
        try:
            transfer = fast.start(array, number)
        except BaseException as problem:  # noqa: BLE001 - the wait for the work raises it
            error = problem
        if transfer is None and error is None:
            direction.leave(gives_turn=True)
            done: Work[Any] = Work(fast.name, turns, on_failure_seen)
            done.end_at_once(None)
            return done
        work = MessageWork(self, words, direction, array, ARRAY, seconds, turns, on_failure_seen, None, None)
        work.number = number
        work.deadline = direction.counters.started + seconds
        # Not by `_sort`: a signal handler may have interrupted that.
        work.steps, work.transfer = iter(()), transfer
        with self._lock:
            self._active[work] = None
            self._begun += 1
            if error is None:
                self._note(work)
                self._call_driver()
            else:
                self._broken.append((work, error))
        if error is not None:
            self._sort(())
        return work

    def admit(self, work: MessageWork) -> None:
        """Begin a message, whose turn has come."""
        self._new.append(work)
        self._sort(())

    def _sort(self, ready: Sequence[MessageWork]) -> None:
        """Advance messages whose transfers are done, and begin those whose turns come."""
        with self._lock:
            if self._is_sorting:  # the caller is below on the stack, and goes on with what is new
                return
            self._is_sorting = True
            try:
                for work in ready:
                    self._advance(work)
                while self._new:
                    self._begin(self._new.popleft())
            finally:
                self._is_sorting = False
            if self._has_more:
                self._has_more = False
                self._call_driver()
            broken, self._broken = self._broken, []
        for work, error in broken:
            self._end(work, self._cause(work, error))
        for _, error in broken:
            if not isinstance(error, Exception):  # a signal handler has raised it in this thread
                raise error

    def _begin(self, work: MessageWork) -> None:
        path, direction = self._path, work.direction
        try:
            path.call_sequence.check(work.words)
        except BaseException as error:  # noqa: BLE001 - the wait for the work raises it
            work.end(None, error)
            direction.give()
            return
        number = work.number = direction.counters.begin(work.words)
        try:
            work.deadline = direction.counters.started + work.seconds
            if self._plugins.observed:
                self._observe(work)
            self._active[work] = None
            self._begun += 1
            if direction.is_send:
                assert work.array is not None
                work.steps = self._mover.send(path.outgoing(direction, number, work.array, work.signature), AT_BEGINNING)
        except BaseException as error:  # noqa: BLE001 - as above
            self._broken.append((work, error))
            return
        if direction.is_send:
            self._advance(work)
            self._has_more = self._has_more or work in self._active
        else:
            self._has_more = True

    def _fetch(self, work: MessageWork) -> Iterator[Transfer]:
        """Receive a message, after a look for a moment."""
        fast, flow = work.fast, None
        if fast is None:
            flow = self._path.incoming(work.direction, work.number, work.array, work.signature)
            yield from self._mover.receive(flow, AT_BEGINNING)
            work.came = flow.array
            return
        transfer = fast.start(work.number)
        if transfer is not None:
            yield transfer
        array = fast.taken(work.array)
        if array is None:
            flow = self._path.incoming(work.direction, work.number, work.array, work.signature)
            yield from self._mover.receive(flow, OPENED)
            array = flow.array
            assert array is not None
            fast.know(array)
        work.came = array

    def _listen(self, work: MessageWork) -> Iterator[Transfer]:
        """Receive a message, without such a look."""
        rank = work.direction.rank
        opening = self._openings.get(rank)
        if opening is None:
            opening = self._openings[rank] = memoryview(bytearray(OPENING_BYTES))
        flow = self._path.incoming(work.direction, work.number, work.array, work.signature)
        yield from self._mover.listen(flow, opening)
        work.came = flow.array

    def _observe(self, work: MessageWork) -> None:
        words, is_send = str(work.words), work.direction.is_send
        work.observation = Observation(
            self._plugins,
            self._job.runtime,
            self._path.members,
            operation=words.partition(" ")[0],
            sequence=work.direction.call,
            nbytes=work.array.nbytes if is_send and work.array is not None else 0,
            dtype=str(work.array.dtype) if is_send and work.array is not None and work.signature is ARRAY else "",
            call=words,
        )

    def _advance(self, work: MessageWork) -> None:
        """Go as far as can be gone without waiting."""
        assert work.steps is not None
        try:
            transfer = work.transfer = next(work.steps, None)
        except BaseException as error:  # noqa: BLE001 - as above
            self._broken.append((work, error))
            self._active.pop(work, None)
            return
        if transfer is None:
            self._end(work, None)
        elif work.record is None:
            self._note(work)

    def _note(self, work: MessageWork) -> None:
        """Make a message that has to wait a record of its own."""
        size = 0 if work.array is None else work.array.nbytes
        work.record = self._path.call_sequence.record_message(work.words, work.direction.call, size)
        work.record.thread = 0  # none runs it

    def _end(self, work: MessageWork, error: BaseException | None) -> None:
        """End a message, and let the next one of its direction have its turn."""
        with self._lock:
            self._active.pop(work, None)
            if work.has_ended():
                return
            result: Any = None
            came = work.came
            if error is None:
                try:
                    result = came if work.make is None else work.make(came)
                except BaseException as problem:  # noqa: BLE001 - as above
                    error = problem
            if work.record is not None:
                self._path.call_sequence.end(work.record, error)
            if work.observation is not None:
                facts = {} if came is None or error is not None else {"nbytes": came.nbytes}
                if facts and work.signature is ARRAY:
                    facts["dtype"] = str(came.dtype)  # type: ignore[union-attr, assignment]
                work.observation.end(error, **facts)
            work.direction.leave(gives_turn=False)
            work.end(result, error)
            if self._parked:
                for place in [place for place, waited in self._parked.items() if waited is work]:
                    del self._parked[place]
                    place.wake()
        work.direction.give()

    # Failures

    def _cause(self, work: MessageWork, error: BaseException) -> BaseException:
        """Return the first cause of the failure of a message, alike on all ranks."""
        path, direction = self._path, work.direction
        deadline = Deadline(work.seconds)
        try:
            if isinstance(error, DescriptionMismatch):
                error = path.mismatch(error, work.words)
            guarded(self._job, path.members, direction.call, work.signature, deadline, partial(again, error), work.words)
        except BaseException as cause:  # noqa: BLE001 - the wait for the work raises it
            return cause
        return error

    def _fail(self, error: BaseException, first: MessageWork | None = None) -> None:
        """End all messages that have begun: the job cannot continue."""
        peer = getattr(error, "peer", None)
        with self._lock:
            works = list(self._active)
        works.sort(key=lambda each: (each is not first, each.direction.rank != peer, each.direction.is_send))
        for work in works:
            self._end(work, self._cause(work, error))
            error = LinkLost(self._job.rank, "the job has ended")

    # Moving

    def poll(self) -> None:
        """Move what can be moved now, without waiting."""
        with self._lock:
            if self._driver is not None or not self._active:
                return
            self._driver = get_ident()
        try:
            if not self._start(patient=False):
                with self._lock:
                    transfers = [work.transfer for work in self._active if work.transfer is not None]
                if transfers:
                    self._transport.poll(transfers)
                self._sort_done()
        except Exception as error:  # noqa: BLE001 - those that wait for the works raise it
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._step_back()

    def wait(self, work: MessageWork, deadline: Deadline | None) -> None:
        """Drive, or let another thread drive, until a message has ended, or until a deadline of the caller's."""
        if self._driver == get_ident():
            raise UsageError(
                f"a signal handler called wait() for {work.words} while this thread was in the middle of another wait, so that it would wait forever: "
                "set a flag in the handler, and wait later, between two calls of the program; the call continues",
                rank=self._job.rank,
                operation=str(work.words),
            )
        while True:
            with self._lock:
                if work.has_ended():
                    return
                place: Place | None = None
                if self._driver is None and self._active:
                    self._driver = get_ident()
                else:
                    place = self._job.runtime.place(for_good=deadline is None)
                    self._parked[place] = work
                    if self._driver is not None and self._helper is not None and self._driver == self._helper.ident:
                        self._interrupt()
            if place is None:
                self._drive_for(work, deadline)
            else:
                came = False
                try:
                    came = place.wait(None if deadline is None else deadline.remaining())
                finally:
                    with self._lock:
                        self._parked.pop(place, None)
                        if not came and self._driver is None:  # it may have been woken to drive all the same
                            self._pass_on()
            if deadline is not None and deadline.passed():
                with self._lock:
                    if self._driver is None:
                        self._pass_on()
                return

    def _drive_for(self, work: MessageWork, deadline: Deadline | None) -> None:
        asleep: Place | None = None
        try:
            until = math.inf if deadline is None else deadline.at
            while self._drive(work.has_ended, until):
                if deadline is not None:  # a thread that gives up may help others then, and is no part of a deadlock
                    continue
                if asleep is None:  # from here on the thread counts as one that only waits
                    asleep = self._job.runtime.place(for_good=True)
                self._report()
        except Exception as error:  # noqa: BLE001 - those that wait for the works raise it
            self._fail(error, work)
        except BaseException as error:
            self._fail(error, work)
            raise
        finally:
            if asleep is not None:
                asleep.wake()
            self._step_back()

    def _drive(self, test: Callable[[], bool], until: float, *, yields: bool = False) -> bool:
        """Drive until a test holds, or until a moment, or until there is nothing to move; return True as soon as nothing has moved for a while.

        If it ``yields``, drive until another thread wants to, and report what does not move.
        """
        stalls_at, moved = time.monotonic() + _FIRST_STALL_S, -1
        while True:
            with self._lock:
                works = list(self._active)
                if not works or test():
                    return False
            first = works[0] if len(works) == 1 else min(works, key=lambda each: each.deadline)
            self._check()
            if self._start(patient=True):
                continue
            transfers = [work.transfer for work in works if work.transfer is not None]
            now = time.monotonic()
            if now >= first.deadline:
                self._fail(Overdue([first.direction.rank]), first)
                continue
            if now >= until or (yields and self._parked):
                return False
            # The thread of core does not know at first whether it can be interrupted.
            slice_s = _SLICE_S if yields and self._slice_s == math.inf else self._slice_s
            limit = min(first.deadline, until, now + slice_s, stalls_at)
            try:
                checked_wait(self._transport, transfers, Deadline(max(limit - now, 1e-9)))
            except TimeoutError:
                if time.monotonic() < stalls_at:
                    continue
                before, moved = moved, sum(transfer.moved for transfer in transfers)
                stalls_at = time.monotonic() + (_FIRST_STALL_S if moved != before else _NEXT_STALL_S)
                if moved == before and not yields:
                    return True
                if moved == before:
                    self._report()
            else:
                moved = -1
                stalls_at = time.monotonic() + _FIRST_STALL_S
                self._sort_done()

    def _start(self, *, patient: bool) -> bool:
        """Begin to receive the messages whose turns have come; return whether there were any. If ``patient``, look for a single one for a moment."""
        with self._lock:
            works = [work for work in self._active if work.steps is None]
            for work in works:
                work.steps = self._fetch(work) if patient and len(works) == 1 else self._listen(work)
        if works:
            self._sort(works)
        return bool(works)

    def _sort_done(self) -> None:
        with self._lock:
            ready = [work for work in self._active if work.transfer is not None and work.transfer.done]
        if ready:
            self._sort(ready)

    def _check(self) -> None:
        if self._job.control.failed or self._job.closed:
            raise LinkLost(self._job.rank, "the job has ended")

    def _report(self) -> None:
        """Report to the store what the messages wait for."""
        sequence = self._path.call_sequence
        with self._lock:
            waits = [(work.record, work.direction, work.number) for work in self._active if work.record is not None]
        for record, direction, number in waits:
            sequence.report_message_wait(record, [(direction.rank, direction.is_send, number)], [direction.rank])

    # Drivers

    def _call_driver(self) -> None:
        """Let a driver know that there is something new to wait for; under the lock."""
        if self._driver is not None:
            if self._driver != get_ident():
                self._interrupt()
        else:
            self._pass_on()

    def _interrupt(self) -> None:
        self._slice_s = _DRIVES_S if self._transport.interrupt() else _SLICE_S

    def _step_back(self) -> None:
        """Let another thread drive."""
        with self._lock:
            self._driver = None
            self._pass_on()

    def _pass_on(self) -> None:
        """Let a thread drive, since none does; under the lock."""
        for place in self._parked:
            place.wake()
            return
        if self._active:
            self._call_helper()

    def _call_helper(self) -> None:
        if self._is_over:
            return
        if self._helper is None:
            # The rules about waiting see by the name that this thread makes no calls of its own.
            self._helper = Thread(target=self._help, name="oneaccord-messages", daemon=True)
            try:
                self._helper.start()
            except RuntimeError:  # no thread can be started: messages move while a thread waits
                self._helper = None
        elif not self._bell.is_set():
            self._bell.set()

    def _help(self) -> None:
        """Be the thread of core."""
        while not self._is_over:
            self._bell.clear()
            for _ in range(_LINGERS):
                begun = self._begun
                time.sleep(_PAUSE_S)
                # A program that begins messages one after the other is about to wait for them.
                while self._is_left_alone and begun == self._begun:
                    self._drive_in_background()
            if self._active or self._bell.wait(_IDLE_S):
                continue
            with self._lock:
                if not self._active and not self._bell.is_set():
                    self._helper = None
                    return
        if self._active:
            self._fail(LinkLost(self._job.rank, "the job has ended"))

    @property
    def _is_left_alone(self) -> bool:
        """Whether there are messages to move that no other thread moves or is about to."""
        return bool(self._active) and self._driver is None and not self._parked and not self._is_over

    def _drive_in_background(self) -> None:
        with self._lock:
            if self._driver is not None:
                return
            self._driver = get_ident()
        try:
            self._drive(bool, math.inf, yields=True)
        except BaseException as error:  # noqa: BLE001 - those that wait for the works raise it
            self._fail(error)
        finally:
            self._step_back()

    def close(self) -> None:
        """End the thread of core."""
        self._job.part(Backgrounds).those.discard(self)
        self._is_over = True
        self._bell.set()
        helper = self._helper
        if helper is not None and helper is not threading.current_thread():
            helper.join(_END_S)
