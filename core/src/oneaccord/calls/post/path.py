"""Messages with tags of one group: how its sends and receives begin, how they are waited for, and what their failures mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from oneaccord.calls.engine.waiting import Overdue
from oneaccord.calls.failures import again, guarded
from oneaccord.calls.observed import Observation, observed
from oneaccord.calls.order.call_sequence import CallSequence
from oneaccord.calls.order.counters import counters_of
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.post.account import Account, Kept, about, came
from oneaccord.calls.post.envelopes import RECORD, opened
from oneaccord.calls.post.messages import Letter, Operation, Receive, Send
from oneaccord.calls.post.office import FIRST_STALL_S, NEXT_STALL_S, NotReady, PostOffice
from oneaccord.calls.post.requests import Cancelled, Request, TaggedWork
from oneaccord.calls.post.status import Status
from oneaccord.config.plugins import PluginManager
from oneaccord.contract.backend import Damaged, HeaderMismatch, LinkLost
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import POST_CHANNEL
from oneaccord.contract.runtime import Place
from oneaccord.control.protocol import Report, Wait
from oneaccord.control.recorder import Record
from oneaccord.errors import ClosedError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["PostPath"]


class PostPath:
    """Messages with tags of one group; safe to use from several threads.

    Parameters
    ----------
    job, members, call_sequence, plugins
        The job, the members of the group, its call sequence, and the plugins that may observe.

    Attributes
    ----------
    office
        The post office of this rank.
    compiled
        The compiled form of the group's calls; None if there is none.
    turns, on_failure_seen, process
        As for `oneaccord.calls.post.requests.Path`; the group gives the first two.
    """

    def __init__(
        self, job: Job, members: Members, call_sequence: CallSequence, plugins: PluginManager, module: ModuleType | None = None
    ) -> None:
        self._job = job
        self._members = members
        self._call_sequence = call_sequence
        self._plugins = plugins
        self._runtime = job.runtime
        self._locals = {world: rank for rank, world in enumerate(members.ranks)}
        self._office: PostOffice | None = None
        kept = job.control.recorder.kept
        shorts = None if module is None else counters_of(module, members.channel + 1, call_sequence.counters, kept)
        self._shorts = Kept(kept, shorts)
        self._module = module
        self.compiled: Any = None
        self.turns: Turns
        self.on_failure_seen: Callable[[], None]
        self.process: int = os.getpid()
        self.others: tuple[int, ...] = tuple(rank for rank in members.ranks if rank != job.rank)

    @property
    def office(self) -> PostOffice:
        """The office, which is made when first used."""
        if self._office is None:
            office = self._job.part(PostOffice)
            self._job.control.counted.tagged[self._members.channel + 1] = self._shorts
            self._office = office
            if self.compiled is not None:
                office.open(self._module, self.compiled, self._shorts.compiled)
        return self._office

    def status_of(self, letter: Letter, status: Status | None = None) -> Status:
        """Return what is known of a message, in ``status`` if that is given."""
        status = Status() if status is None else status
        status.fill(letter, self._locals[letter.source])
        return status

    # Calls that wait

    def run(self, what: object, operations: Sequence[Operation], timeout_s: float, nbytes: int = 0) -> None:
        """Begin some operations, and wait until all have ended.

        Raises
        ------
        CommError
            The first cause, alike on all ranks.
        UsageError
            A message that came cannot be received as asked.
        """
        one = operations[0]
        begin: Callable[[], None] = partial(self._begin_all, operations)
        if not self._plugins.settled:
            self._plugins.load_extensions()
        if self._plugins.observed and not operations[-1].is_served:  # a window shows its calls itself, each once
            with observed(self._plugins, self._runtime, self._members, **self._facts(what, operations, nbytes)) as known:
                self._call(what, begin, operations, timeout_s, nbytes)
                for each in operations:
                    if each.error is not None:
                        raise each.error
                known.update(came(operations))
        elif len(operations) == 1 and not self._runtime.is_simulated and self._office is not None:
            if self._pass_through(what, one):
                if one.error is not None:
                    raise one.error
                return
            if one.has_begun:
                begin = _nothing
            self._call(what, begin, operations, timeout_s, nbytes)
        else:
            self._call(what, begin, operations, timeout_s, nbytes)
        self.took(operations)
        for each in operations:
            if each.error is not None:
                raise each.error

    def _facts(self, what: object, operations: Sequence[Operation], nbytes: int, number: int = 0) -> dict[str, Any]:
        """Return what observers learn of a call when it begins."""
        words = str(what)
        first = next((each for each in operations if isinstance(each, Send)), None)
        name = words.partition(" ")[0]
        return {
            "operation": "sendrecv" if name == "send" and len(operations) > 1 else name,
            "sequence": number or self._call_sequence.messages + 1,
            "nbytes": nbytes,
            "dtype": "" if first is None or first.dtype is None else str(first.dtype),
            "call": words,
        }

    def _pass_through(self, what: object, operation: Operation) -> bool:
        """Try the short way of a call; return whether it has ended. If not, `Operation.has_begun` says how far it got."""
        office, sequence = self.office, self._call_sequence
        if office.is_taken_by_caller or operation.is_met or not isinstance(operation, Send | Receive):
            return False
        started = self._runtime.now()
        try:
            operation.has_begun = office.pass_through(operation)
        except BaseException as error:  # noqa: BLE001 - raised as the first cause
            number, deadline = sequence.count_message(), Deadline(1.0)
            guarded(self._job, self._members, number, RECORD, deadline, partial(again, self._told(error, [operation])), what)
        if not operation.done:
            return False
        number = sequence.count_message()
        self._shorts.calls.append((self._members.channel + 1, number, what, started, self._runtime.now()))
        return True

    def note(self, what: object, started: float) -> None:
        """Note a call that has ended, and that needed no message."""
        number = self._call_sequence.count_message()
        assert self._office is not None
        self._shorts.calls.append((self._members.channel + 1, number, what, started, self._runtime.now()))

    def send_on(self, what: object, send: Send, gone: int, timeout_s: float) -> None:
        """Go on with a send that C has begun, of which ``gone`` bytes have left; raises as `run`."""
        self._call(what, partial(self.office.send_on, send, gone), [send], timeout_s, len(send.data))

    def take_on(self, what: object, receive: Receive, about: bytes, data: memoryview, came: int, timeout_s: float) -> None:
        """Go on with a receive whose message's opening, ``about`` it, C has taken, and the first bytes of its ``data``; raises as `run`."""
        letter = Letter(receive.key[1], opened(memoryview(about), receive.key[1]))
        self._call(what, partial(self.office.take_on, receive, letter, data, came), [receive], timeout_s, 0)

    def probe(self, what: object, pattern: Receive, timeout_s: float, *, take: bool) -> Letter:
        """Wait for a message that a receive would meet, and return it; ``take`` it out, so that no other receive meets it."""
        found: list[Letter] = []

        def test() -> bool:
            if not found and (letter := self.office.find(pattern)) is not None:
                found.append(letter)
                if take:
                    self.office.matching.remove(letter)
            return bool(found)

        if not self._plugins.settled:
            self._plugins.load_extensions()
        if not self._plugins.observed:
            self._call(what, lambda: None, [pattern], timeout_s, 0, test)
            return found[0]
        with observed(self._plugins, self._runtime, self._members, **self._facts(what, [pattern], 0)) as known:
            self._call(what, lambda: None, [pattern], timeout_s, 0, test)
            known.update(about(found[0]))
        return found[0]

    def look(self, what: object, pattern: Receive, timeout_s: float, *, take: bool) -> Letter | None:
        """Return a message that a receive would meet now; None if there is none."""
        office = self.office
        self._call_sequence.check(what)
        with office.entered(what):
            try:
                self._connect([pattern], timeout_s)
                letter = self._found(pattern, take=take)
                if letter is None:
                    office.check()
                    office.poll()
                    letter = self._found(pattern, take=take)
                if letter is None:
                    self._runtime.glance()
                    if self._runtime.is_simulated:
                        office.poll()
                        letter = self._found(pattern, take=take)
            except BaseException as error:  # noqa: BLE001 - raised as the first cause
                raise self.failure(pattern, error) from None
        return letter

    def _found(self, pattern: Receive, *, take: bool) -> Letter | None:
        office = self.office
        with office.lock:
            letter = office.find(pattern)
            if letter is not None and take:
                office.matching.remove(letter)
        return letter

    def _call(
        self,
        what: object,
        begin: Callable[[], None],
        operations: Sequence[Operation],
        timeout_s: float,
        nbytes: int,
        test: Callable[[], bool] | None = None,
    ) -> None:
        """Begin a call, and wait until ``test()`` holds; by default, until the operations have ended."""
        office, sequence, runtime = self.office, self._call_sequence, self._runtime
        office.check_not_inside(what)
        number = sequence.count_message()
        sequence.check(what, number)
        started = runtime.now()
        record = sequence.record_message(what, number, nbytes) if runtime.is_simulated else None
        deadline: Deadline | None = None

        def until() -> Deadline:
            nonlocal deadline
            if deadline is None:
                deadline = Deadline(timeout_s, runtime.now)
                deadline.at += started - runtime.now()
            return deadline

        def stalled() -> None:
            nonlocal record
            if record is None:
                record = sequence.record_message(what, number, nbytes, started)
            self._report(record, operations)

        def check() -> None:
            office.check()
            sequence.check(what, number)

        def wait() -> None:
            self._connect(operations, timeout_s, until)
            with office.lock:
                begin()
            ends = partial(_all_done, operations) if test is None else test
            if test is None:
                one = operations[0]
                if not one.done and not one.has_begun and len(operations) == 1 and not runtime.is_simulated:
                    office.look(one)
                if ends():
                    return
            if record is not None:
                record.wait = self._wait(record, operations)
            on_stall = None if runtime.is_simulated else stalled
            office.wait(ends, until(), on_stall, partial(_awaits, operations), check=check)

        try:
            with office.entered(what):
                wait()
        except ClosedError as error:  # by another thread; the job is well
            for each in operations:
                office.end(each, error)
            raise
        except BaseException as error:  # noqa: BLE001 - raised as the first cause
            guarded(self._job, self._members, number, RECORD, until(), partial(again, self._told(error, operations)), what)
        finally:
            if record is not None:
                sequence.end(record)
            else:
                self._shorts.calls.append((self._members.channel + 1, number, what, started, runtime.now()))

    def _begin_all(self, operations: Sequence[Operation]) -> None:
        office, history = self.office, self._runtime.history
        for each in operations:
            if history is not None and isinstance(each, Send) and not each.is_served:
                history.gives(self._job.rank, (each.context, self._job.rank, each.peer, each.tag))
            if isinstance(each, Receive):
                if each.letter is None:
                    office.receive(each)
                else:
                    office.meet(each, each.letter)
            elif isinstance(each, Send):
                office.send(each)

    def took(self, operations: Sequence[Operation]) -> None:
        """Note that the program has the messages of some receives."""
        history = self._runtime.history
        for each in operations if history is not None else ():
            if history is not None and isinstance(each, Receive) and each.letter is not None and not each.is_served:
                history.takes(self._job.rank, (each.letter.context, each.letter.source, self._job.rank, each.letter.tag))

    def _connect(self, operations: Sequence[Operation], timeout_s: float, until: Callable[[], Deadline] | None = None) -> None:
        if until is None:
            until = partial(Deadline, timeout_s, self._runtime.now)
        for each in operations:
            self.office.connect(each.awaits(), until)

    # Requests

    def start(
        self,
        what: object,
        operations: Sequence[Operation],
        timeout_s: float,
        request: Request[Any] | None = None,
        gone: int | None = None,
    ) -> None:
        """Begin operations for which the program waits later, by a ``request``, if at all; raises as `run`.

        ``gone`` is how many bytes of a send have left that C has begun.
        """
        office, sequence, runtime = self.office, self._call_sequence, self._runtime
        office.check_not_inside(what)
        number = sequence.count_message()
        sequence.check(what, number)
        nbytes = sum(len(each.data) for each in operations if isinstance(each, Send))
        account, started = self._account(what, operations, nbytes, number), runtime.now()
        try:
            with office.entered(what):
                self._connect(operations, timeout_s)
                with office.lock:
                    if gone is None:
                        self._begin_all(operations)
                    for each in operations:
                        each.path = self
                        if gone is not None and isinstance(each, Send):
                            office.send_on(each, gone)
                        office.keep(each, timeout_s)
                    if request is not None:
                        self._shorts.running[request] = self._members.channel + 1, number, what, started, 0.0
                        request.begin(account)
            if request is None:
                self._shorts.calls.append((self._members.channel + 1, number, what, started, runtime.now()))
                if account is not None:
                    account.end(None, operations)
        except BaseException as error:  # noqa: BLE001 - raised as the first cause
            try:
                deadline = Deadline(timeout_s, runtime.now)
                guarded(self._job, self._members, number, RECORD, deadline, partial(again, self._told(error, operations)), what)
            except BaseException as cause:
                self._shorts.calls.append((self._members.channel + 1, number, what, started, runtime.now()))
                if account is not None:
                    account.end(cause, operations)
                raise
        finally:
            if account is not None and account.record is not None:
                sequence.go_on(account.record)

    def _account(self, what: object, operations: Sequence[Operation], nbytes: int, number: int) -> Account | None:
        """Let those learn that a call begins that see all of them; None if nobody is there."""
        if not self._plugins.settled:
            self._plugins.load_extensions()
        observation: Observation | None = None
        if self._plugins.observed:
            facts = self._facts(what, operations, nbytes, number)
            observation = Observation(self._plugins, self._runtime, self._members, **facts)
        elif not self._runtime.is_simulated:
            return None
        record = self._call_sequence.record_message(what, number, nbytes) if self._runtime.is_simulated else None
        return Account(self._call_sequence, observation, record)

    def has_ended(self, request: TaggedWork[Any]) -> bool:
        """Return whether a request has ended, when no thread is about to end it."""
        with self.office.lock:
            return request._ended

    def concluded(self, request: TaggedWork[Any], error: BaseException | None, account: Account | None) -> None:
        """Take note that a request has ended."""
        self._shorts.end(request, self._runtime.now())
        if account is not None:
            account.end(error, request.operations)

    def wait_for(self, operations: Sequence[Operation], deadline: Deadline | None, *, is_last: bool = False) -> None:
        """Wait until some operations have ended, or until a deadline of the caller's, who may then help others unless this ``is_last``; their errors are theirs."""
        office, sequence, runtime = self.office, self._call_sequence, self._runtime
        if len(operations) == 1 and not runtime.is_simulated and not office.is_taken_by_caller:
            self._waited(operations, partial(office.pass_by, operations[0]), is_own=False)
            if operations[0].done:
                return
        test = partial(_all_done, operations)
        record: Record | None = None
        number, started = sequence.messages, runtime.now()

        def stalled() -> None:
            nonlocal record
            if record is None:
                record = sequence.record_message(f"wait for {_names(operations)}", number, started=started)
            self._report(record, operations)

        own = Deadline(max(office.time_left(operations), 1e-9), runtime.now)
        until = own if deadline is None or own.at <= deadline.at else deadline

        def wait() -> None:
            nonlocal record
            if runtime.is_simulated:
                record = sequence.record_message(f"wait for {_names(operations)}", number)
                record.wait = self._wait(record, operations)
            if not test():
                # A thread that gives up may help others then, and is no part of a deadlock.
                on_stall = None if runtime.is_simulated else stalled if until is own or is_last else _nothing
                office.wait(test, until, on_stall, partial(_awaits, operations), gives_up=until is not own)

        try:
            with office.entered(f"wait() for {_names(operations)}"):
                self._waited(operations, wait, is_own=until is own)
        finally:
            if record is not None:
                sequence.end(record)

    def wait_at(self, place: Place, operations: Sequence[Operation]) -> None:
        """Wait at a place until one of several requests has ended, for which no thread waits; let others know that this one does."""
        sequence, runtime = self._call_sequence, self._runtime
        started, patience, number = runtime.now(), FIRST_STALL_S, sequence.messages
        what, record = f"wait for any of {_names(operations)}", None
        if runtime.is_simulated:
            record = sequence.record_message(what, number)
            record.wait = self._wait(record, operations, first=True)
        try:
            while not place.wait(None if runtime.is_simulated else patience):
                patience = NEXT_STALL_S
                if record is None:
                    record = sequence.record_message(what, number, started=started)
                self._report(record, operations, first=True)
        finally:
            if record is not None:
                sequence.end(record)

    def _waited(self, operations: Sequence[Operation], wait: Callable[[], None], *, is_own: bool) -> None:
        """Wait; what fails ends the operations, but for a deadline that is not their own."""
        try:
            wait()
        except Overdue as error:
            if is_own:
                self._end(operations, error)
        except BaseException as error:
            self._end(operations, error)
            if not isinstance(error, Exception):
                raise

    def poll(self, operations: Callable[[], Sequence[Operation]]) -> None:
        """Move what can be moved now, without waiting; nothing in the middle of another call of this thread. What fails ends the ``operations``."""
        if self.office.is_taken_by_caller:
            return
        try:
            self.office.check()
            with self.office.entered("done()"):
                self.office.poll()
        except BaseException as error:
            self._end(operations(), error)
            if not isinstance(error, Exception):
                raise

    def cancel(self, receive: Receive) -> bool:
        """Take a receive back that has met no message; return whether that was so."""
        office = self.office
        self.poll(lambda: [receive])
        with office.entered("cancel()"), office.lock:
            if receive.done or not office.matching.withdraw(receive):
                return False
            office.end(receive, Cancelled(f"{receive.what} was taken back by cancel(): it has received nothing"))
        return True

    def _end(self, operations: Sequence[Operation], error: BaseException) -> None:
        for each in operations:
            if not each.done:
                self.office.end(each, self.failure(each, error))

    def drain(self, deadline: Deadline) -> bool:
        """Wait until the requests of this group have ended; return whether there were none. Those that are left end with `ClosedError`."""
        office = self._office
        if office is None:
            return True
        left = office.kept(self._members.number)
        if not left and not office.has_duties:
            return True
        if left:
            self.wait_for(left, deadline, is_last=True)
        else:
            try:
                office.wait(lambda: not office.has_duties, deadline, None, list)
            except (Overdue, LinkLost, HeaderMismatch, Damaged, NotReady):  # answers that no peer waits for any more
                return True
        for each in left:
            if not each.done and deadline.passed():
                text = f"the group was closed before {each.what} had ended"
                office.end(each, ClosedError(text, rank=self._job.rank, operation=str(each.what)))
        return False

    # Failures

    def failure(self, operation: Operation, error: BaseException) -> BaseException:
        """Return the error of an operation that ends with an exception of the office: the first cause, alike on all ranks."""
        deadline = Deadline(1.0, self._runtime.now)
        left = self.office.time_given(operation)
        deadline.timeout_s = left
        try:
            guarded(
                self._job,
                self._members,
                self._call_sequence.messages,
                RECORD,
                deadline,
                partial(again, self._told(error, [operation])),
                operation.what,
            )
        except BaseException as cause:  # noqa: BLE001 - it is raised where the operation is waited for
            return cause
        return error

    def _told(self, error: BaseException, operations: Sequence[Operation]) -> BaseException:
        """Return what an exception of the office means, where `guarded` cannot know it."""
        job = self._job
        if isinstance(error, NotReady):
            text = (
                f"rank {error.peer} sent {error} with mode='ready', but rank {job.rank} had not begun to receive it: begin the receive "
                "first, or leave the mode out"
            )
            return job.fail(Report("mismatch", text, error.peer, members=list(self._members.ranks)))
        if isinstance(error, Overdue) and len(_awaits(operations)) != 1:
            return TimeoutError("no rank sent a message that fits")
        return error

    def _wait(self, record: Record, operations: Sequence[Operation], *, first: bool = False) -> Wait:
        """Return what a call waits for, for the store: each wait is for the next record of a rank, or of any of several.

        The call waits for all of its operations, or for the ``first`` that ends.
        """
        rank, number = self._job.rank, self._members.number
        waiting = [each for each in operations if not each.done] or operations
        if not first:
            waiting = waiting[:1]
        peers = sorted({peer for each in waiting for peer in each.awaits()} - {rank})
        counts = {peer: self.office.counts(peer) for peer in peers}
        sends = all(isinstance(each, Send) and not each.number for each in waiting)  # a receiver need not answer these
        return Wait(
            POST_CHANNEL,
            record.sequence,
            str(record.call),
            b"",
            peers,
            [(peer, True, counts[peer][1] - 1) if sends else (peer, False, counts[peer][0]) for peer in peers],
            list(self._members.ranks),
            group=None if first and any(each.context != number for each in waiting) else number,
            is_any=len(waiting) > 1 or waiting[0].is_any,
            taken={peer: counts[peer][1] for peer in peers},
            is_own=any(each.is_own(rank) for each in waiting),
        )

    def _report(self, record: Record, operations: Sequence[Operation], *, first: bool = False) -> None:
        left = [each for each in operations if not each.done]
        if not left or any(each.is_served for each in left):  # of the latter, the store cannot know on whose program it depends
            return
        wait = self._wait(record, operations, first=first)
        if (wait.awaiting or wait.is_own) and not self.office.is_reading(wait.awaiting):
            self._job.control.report_wait(record, wait)


def _nothing() -> None:
    pass


def _all_done(operations: Sequence[Operation]) -> bool:
    return all(each.done for each in operations)


def _awaits(operations: Sequence[Operation]) -> list[int]:
    return next((each.awaits() for each in operations if not each.done), [])


def _names(operations: Sequence[Operation]) -> str:
    names = [str(each.what) for each in operations[:4]]
    return ", ".join(names if len(operations) <= 4 else [*names, f"{len(operations) - 4} more"])
