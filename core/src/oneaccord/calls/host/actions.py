"""Calls on the host's memory: a step becomes an action on memory, and its request a plan that is carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from oneaccord.arrays.libraries import DeviceArray
from oneaccord.arrays.memory import Array, contiguous, divide, given, placed
from oneaccord.calls.engine.waiting import Waiter
from oneaccord.calls.failures import again, exchange_cards, guarded
from oneaccord.calls.host.fast import CachedCall
from oneaccord.calls.host.plans import VECTOR, Plan, Plans
from oneaccord.calls.observed import observed
from oneaccord.calls.order.call_sequence import CallSequence
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.request import Local, Operation, Request, SizeExchange
from oneaccord.config.plugins import PluginManager
from oneaccord.config.select import Selector
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import CallSignature
from oneaccord.control.protocol import Report
from oneaccord.control.recorder import Record
from oneaccord.errors import OneAccordError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job
from oneaccord.schedule.steps import Collective

__all__ = ["CopyAction", "HostAction", "HostPath", "TellAction"]


class HostPath:
    """The collectives of one group on the host's memory.

    Parameters
    ----------
    job, members, call_sequence
        The job, the members of the group, and its call sequence.
    plugins, selector
        The plugins that may observe and offer native collectives, and the selector of algorithms.

    Attributes
    ----------
    call_sequence
        The group's call sequence.
    plans
        The plans of its requests.
    moves
        Whether the backend moves the host's memory.
    """

    def __init__(
        self, job: Job, members: Members, call_sequence: CallSequence, plugins: PluginManager, selector: Selector
    ) -> None:
        self._job = job
        self._members = members
        self._plugins = plugins
        self.call_sequence: CallSequence = call_sequence
        self.plans: Plans = Plans(job, members, plugins, selector)
        self.moves: bool = job.backend is None or "cpu" in job.backend.memory

    def prepare(self, step: Operation) -> HostAction:
        """Find the memory that a step works on; raises as `placed`."""
        source, out = step.source, step.out
        assert not isinstance(source, DeviceArray)
        assert not isinstance(out, DeviceArray)
        if step.shape is None:
            return HostAction(self, step, contiguous(source), np.empty(0, step.request.dtype))
        if out is None and source.flags.c_contiguous:
            try:
                return HostAction(self, step, source, np.empty(step.shape, step.request.dtype))
            except (MemoryError, ValueError):
                pass  # `placed` says so in our words
        may_alias = step.request.collective in VECTOR
        memory, target = placed(source, step.shape, step.request.dtype, out, may_alias=may_alias)
        return HostAction(self, step, memory, target)

    def run(self, request: Request, source: Array, target: Array, deadline: Deadline) -> None:
        """Carry out a request, whose turn it is.

        Parameters
        ----------
        request
            The request.
        source, target
            C-contiguous arrays; empty if this rank holds none.
        deadline
            Until when.

        Raises
        ------
        CommError
            The first cause, alike on all ranks; ``target`` is undefined and the group revoked.
        """
        call_sequence = self.call_sequence
        if not self._plugins.settled:
            self._plugins.load_extensions()
        call_sequence.check(request, call_sequence.next)
        if not self.moves and request.collective is Collective.BARRIER:
            self._exchange(request.name, b"", deadline)
            return
        plan = self.plans.of(request)
        record = call_sequence.begin(plan.signature, plan.nbytes)
        try:
            if self._plugins.observed:
                self._run_observed(plan, source, target, record, deadline)
            else:
                self._run(plan, source, target, record, deadline)
        finally:
            call_sequence.end(record)

    def tell(self, told: SizeExchange, deadline: Deadline) -> Array:
        """Exchange numbers between the ranks; return those for this rank. Raises as `run`."""
        if told.by_store:
            return self._tell_by_store(told, deadline)
        is_sent = told.request.collective is not Collective.BROADCAST or told.request.root == self._members.rank
        heard = np.empty(told.count, told.numbers.dtype)
        self.run(told.request, told.numbers if is_sent else np.empty(0, heard.dtype), heard, deadline)
        return heard

    def fast(self, action: HostAction) -> CachedCall | None:
        """Return the fast path for such calls as a prepared one, if they have one and the group may be used; the plan is made now if need be."""
        step, request = action.step, action.step.request
        if (
            not step.is_repeatable
            or step.give is not None
            or self._job.runtime.is_simulated
            or not self.call_sequence.is_usable
        ):
            return None
        if not self._plugins.settled:
            self._plugins.load_extensions()
        if not self.moves and request.collective is Collective.BARRIER:
            return None
        return CachedCall(
            self._job,
            self._members,
            self.call_sequence,
            self.plans.of(request),
            request.dtype,
            request.shape if step.shape is None else step.shape,
            in_place=request.collective in VECTOR,
            gives=request.collective is not Collective.BROADCAST or request.root == self._members.rank,
            takes=step.shape is not None,
            identity=step.identity,
        )

    def give_up(self, text: str) -> OneAccordError:
        """End the job for a mismatch that this rank alone can see; return the error to raise."""
        return self._job.fail(Report("mismatch", text, peer=self._job.rank, members=list(self._members.ranks)))

    # Carrying out

    def _run(self, plan: Plan, source: Array, target: Array, record: Record, deadline: Deadline) -> None:
        signature, sequence = plan.signature, record.sequence
        stall = None if self._job.runtime.is_simulated else partial(self.call_sequence.report_wait, record, signature)

        try:
            plan.ready(lambda: deadline).run(source, target, sequence, partial(Waiter, deadline, stall))
        except BaseException as error:  # noqa: BLE001 - it is raised again, as the first cause or as it was
            guarded(self._job, self._members, sequence, signature, deadline, partial(again, error))
        if plan.divisor > 1 and target.size:
            divide(target, plan.divisor)

    def _run_observed(self, plan: Plan, source: Array, target: Array, record: Record, deadline: Deadline) -> None:
        with observed(
            self._plugins,
            self._job.runtime,
            self._members,
            operation=plan.signature.operation,
            sequence=record.sequence,
            algorithm=plan.carrier,
            nbytes=plan.nbytes,
            dtype=str(source.dtype) if plan.signature.dtype else "",
        ):
            self._run(plan, source, target, record, deadline)

    # Calls that go through the store if the backend moves no host memory

    def _exchange(self, what: str, card: bytes, deadline: Deadline, alike: str = "") -> list[bytes]:
        """Trade cards with all members; ``alike`` must be the same on all of them."""
        call_sequence, members = self.call_sequence, self._members
        sequence = call_sequence.next
        call_sequence.check(what, sequence)
        signature = CallSignature(what, part="meeting")
        name = f"{what} #{sequence} of {members.name}"
        cards, _ = exchange_cards(
            self._job, members, name, alike.encode() + b"\0" + card, members.ranks, deadline, (signature, sequence)
        )
        call_sequence.number()
        told = [each.partition(b"\0") for each in cards]
        for rank, (theirs, _, _) in enumerate(told):
            if theirs != alike.encode():
                raise self.give_up(
                    f"in {what}, rank {members.rank} has {alike}, and rank {rank} has {theirs.decode(errors='replace')}"
                )
        return [each for _, _, each in told]

    def _tell_by_store(self, told: SizeExchange, deadline: Deadline) -> Array:
        what, root, rank, mine = told.request.name, told.request.root, self._members.rank, told.numbers
        is_broadcast = told.request.collective is Collective.BROADCAST
        card = mine.tobytes() if not is_broadcast or rank == root else b""
        cards = self._exchange(what, card, deadline, told.alike)
        if is_broadcast:
            return self._numbers(what, root, cards[root], told.count)
        place = rank if mine.size > 1 else 0
        numbers = [self._numbers(what, sender, each, mine.size) for sender, each in enumerate(cards)]
        return np.array([each[place] for each in numbers], mine.dtype)

    def _numbers(self, what: str, rank: int, card: bytes, count: int) -> Array:
        """Return the integers on a rank's card; end the job if their number is wrong."""
        if len(card) == count * 8:
            return np.frombuffer(card, np.int64)
        peer = self._members.ranks[rank]
        text = f"in {what}, rank {peer} sent {len(card)} bytes to the other ranks instead of {count * 8}"
        raise self._job.fail(Report("protocol", text, peer, members=list(self._members.ranks)))


class HostAction:
    """A step that is ready to run when its turn comes.

    Parameters
    ----------
    path, step
        The group's path, and the step.
    source, target
        The memory: C-contiguous, empty if this rank holds none.
    """

    __slots__ = ("_path", "source", "step", "target", "turns")

    def __init__(self, path: HostPath, step: Operation, source: Array, target: Array) -> None:
        self._path = path
        self.step: Operation = step
        self.source: Array = source
        self.target: Array = target
        self.turns: tuple[Turns, ...] = (path.call_sequence,)

    def apart(self, targets: Sequence[Array]) -> Callable[[Any], Any] | None:
        """Let it work on memory of its own instead of ``targets``; return a function that turns its result into the caller's. None if it does not write there."""
        step, out = self.step, self.step.out
        assert not isinstance(out, DeviceArray)
        if step.shape is None or out is None or not any(np.may_share_memory(out, target) for target in targets):
            return None
        self.step = structs.replace(step, out=None, give=None)
        self.source, self.target = self.source.copy(), self.target.copy()
        return partial(given, out, step.give)

    def run(self, deadline: Deadline) -> Any:
        """Carry it out, and return the caller's result."""
        step, target = self.step, self.target
        self._path.run(step.request, self.source, target, deadline)
        if step.shape is None:
            return None
        if step.identity is not None:
            target[...] = step.identity
        out = step.out
        assert not isinstance(out, DeviceArray)
        return given(out, step.give, target)


class TellAction:
    """Numbers that are ready to be exchanged when their turn comes."""

    __slots__ = ("_path", "told", "turns")

    def __init__(self, path: HostPath, told: SizeExchange) -> None:
        self._path = path
        self.told: SizeExchange = told
        self.turns: tuple[Turns, ...] = (path.call_sequence,)

    def run(self, deadline: Deadline) -> Array:
        """Exchange them, and return those for this rank."""
        return self._path.tell(self.told, deadline)


class CopyAction:
    """A copy on the host that is ready to be made; it waits for no turn."""

    __slots__ = ("_call_sequence", "_local", "_source", "_target")

    turns: tuple[Turns, ...] = ()

    def __init__(self, call_sequence: CallSequence, local: Local) -> None:
        self._call_sequence = call_sequence
        self._local = local
        self._source = self._target = None
        if local.source is not None:
            source, out = local.source, local.out
            assert not isinstance(source, DeviceArray)
            assert not isinstance(out, DeviceArray)
            self._source, self._target = placed(source, source.shape, source.dtype, out, may_alias=True)

    def run(self, _: Deadline) -> Any:
        """Make the call, and return the caller's result."""
        self._call_sequence.check()
        if self._source is None or self._target is None:
            return None
        self._target[...] = self._source
        out, give = self._local.out, self._local.give
        assert not isinstance(out, DeviceArray)
        return given(out, give, self._target)
