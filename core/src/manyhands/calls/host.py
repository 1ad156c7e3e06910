"""Carries out the collectives of one group: from a call to a plan, and from a failure to the error that says why."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from manyhands.arrays.dtypes import Reduction, dtype_code, fields_of
from manyhands.arrays.memory import Array, divide
from manyhands.calls.engine import MAX_MESSAGES, Engine, Express, Plan, compile_plan, has_long
from manyhands.calls.engine.waiting import Waiter
from manyhands.calls.failures import check_usable, guarded
from manyhands.calls.fast import Kind, Native, Shortcut
from manyhands.calls.turns import Lane
from manyhands.config.plugins import PluginManager
from manyhands.config.select import Selector
from manyhands.contract.backend import CollectiveRequest
from manyhands.contract.deadline import Deadline
from manyhands.contract.observe import OperationEvent
from manyhands.control.protocol import Wait
from manyhands.control.recorder import Record
from manyhands.control.signatures import CallSignature
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job
from manyhands.schedule.algorithms.doubling import barrier as dissemination
from manyhands.schedule.algorithms.registry import BUILTIN, Algorithm
from manyhands.schedule.chunking import blocks, even
from manyhands.schedule.compose import in_parallel
from manyhands.schedule.contracts import PROMISES
from manyhands.schedule.steps import Collective, Schedule

__all__ = ["Call", "Collectives"]

_log = logging.getLogger("manyhands.calls")

_MAX_PLANS = 512
_MAX_SCHEDULES = 1024
_MAX_SHORTCUTS = 512
_ONE_WAY = frozenset(
    {Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER, Collective.SCAN, Collective.EXSCAN}
)
_VECTOR = frozenset({Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST, Collective.SCAN, Collective.EXSCAN})


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call: all that its plan depends on, and what every rank must give alike.

    Attributes
    ----------
    collective
        What is called.
    dtype
        The dtype of the arrays.
    shape
        The shape that all ranks must have in common.
    counts
        Elements in each rank's block, in the order of ranks; for all_to_all those that this rank sends. Empty for collectives
        that do not divide by ranks.
    receive_counts
        For all_to_all, the elements that this rank receives.
    reduction, root
        Where there is one; -1 for no root.
    uneven
        What the caller divided axis 0 into, where it did and all ranks must agree.
    reproducible
        Whether the bits of the result must not depend on the algorithm.
    operation, part
        For a call that is only a part of what the user called: the user's operation, and which part.
    """

    collective: Collective
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    counts: tuple[int, ...] = ()
    receive_counts: tuple[int, ...] = ()
    reduction: Reduction | None = None
    root: int = -1
    uneven: tuple[int, ...] | None = None
    reproducible: bool = False
    operation: str = ""
    part: str = ""

    def signature(self, *, algorithm: str = "", device: str = "") -> CallSignature:
        """Return what all ranks must call alike: this, by an algorithm, on a kind of device where that is not the host's memory."""
        reduction = self.reduction
        return CallSignature(
            operation=self.operation or self.collective.value,
            part=self.part,
            dtype=0 if self.collective is Collective.BARRIER else dtype_code(self.dtype),
            shape=self.shape,
            op=reduction.name if reduction else "",
            op_code=reduction.code if reduction else 0,
            root=self.root,
            counts=self.uneven,
            reproducible=self.reproducible,
            algorithm=algorithm,
            count=math.prod(self.shape),
            device=device,
            fields=fields_of(self.dtype),
        )


@dataclass(slots=True)
class _Prepared:
    """A call made ready once and run many times; ``way`` is missing where the engine must do it, or before the first run."""

    signature: CallSignature
    engine: Engine
    plan: Plan
    carrier: str
    nbytes: int
    in_order: bool
    divisor: int
    elements: int
    """Those of input and output, -1 where these are not of one size."""
    way: Express | Native | None = None


class Collectives:
    """The collectives of one group; whoever calls them takes turns.

    Parameters
    ----------
    job
        Where the group lives.
    members
        Who belongs to it.
    plugins, selector
        Who may offer native collectives, and who chooses algorithms.

    Attributes
    ----------
    lane
        Where callers take turns.
    sequence
        The number of the next call.
    shortcuts
        Kinds of calls that were made before, and need not be looked up again.
    """

    def __init__(self, job: Job, members: Members, plugins: PluginManager, selector: Selector) -> None:
        self._job = job
        self._members = members
        self._channel = members.channel
        self._plugins = plugins
        self._selector = selector
        self.lane: Lane = Lane(job.runtime)
        self.sequence: int = 0
        self.shortcuts: dict[Hashable, Shortcut] = {}
        self._engine: Engine | None = None
        self._barrier: Engine | None = None
        self._prepared: dict[Call, _Prepared] = {}

    def run(self, call: Call, source: Array, target: Array, deadline: Deadline) -> None:
        """Carry out a call.

        Parameters
        ----------
        call
            What to do.
        source, target
            C-contiguous arrays; empty where this rank holds none.
        deadline
            Until when.

        Raises
        ------
        CommError
            The first cause, alike on all ranks; ``target`` is undefined and the group revoked.
        """
        check_usable(self._job, self._members.number, call.operation or call.collective.value, self.sequence)
        prepared = self._prepared.get(call) or self._prepare(call)
        sequence = self.sequence
        self.sequence = self._job.control.progress.calls[self._channel] = sequence + 1
        recorder = self._job.control.recorder
        record = recorder.start(self._channel, sequence, prepared.signature, prepared.nbytes)
        try:
            if self._plugins.observers():
                self._run_observed(prepared, source, target, record, deadline)
            else:
                self._run(prepared, source, target, record, deadline)
        finally:
            recorder.finish(record)

    def close(self) -> None:
        """Give back the transports; no call may follow."""
        for engine in (self._engine, self._barrier):
            if engine is not None:
                engine.transport.close()

    def _run(self, prepared: _Prepared, source: Array, target: Array, record: Record, deadline: Deadline) -> None:
        signature, sequence = prepared.signature, record.sequence
        engine = prepared.engine
        stall = None if self._job.runtime.is_simulated else partial(self.stalled, record, signature)

        def action() -> None:
            way = prepared.way or self._express(prepared, engine, source.dtype, deadline)
            if way is None:
                engine.run(prepared.plan, source, target, sequence, deadline, stall)
            else:
                patience = partial(Waiter, engine.transport, deadline, stall)
                way.run(source.reshape(-1), target.reshape(-1), sequence, patience)

        guarded(self._job, self._members, sequence, signature, deadline, action)
        if prepared.divisor > 1 and target.size:
            divide(target, prepared.divisor)

    def _run_observed(self, prepared: _Prepared, source: Array, target: Array, record: Record, deadline: Deadline) -> None:
        event = OperationEvent(
            group=str(self._members.number),
            rank=self._members.rank,
            operation=prepared.signature.operation,
            sequence=record.sequence,
            algorithm=prepared.carrier,
            nbytes=prepared.nbytes,
            dtype=str(source.dtype) if prepared.signature.dtype else "",
            started_ns=self._now_ns(),
        )
        self._plugins.notify_started(event)
        error: BaseException | None = None
        try:
            self._run(prepared, source, target, record, deadline)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._plugins.notify_finished(replace(event, finished_ns=self._now_ns(), error=error))

    def _now_ns(self) -> int:
        runtime = self._job.runtime
        return round(runtime.now() * 1e9) if runtime.is_simulated else time.monotonic_ns()

    def _express(self, prepared: _Prepared, engine: Engine, dtype: np.dtype[Any], deadline: Deadline) -> Express | None:
        """Return the short way of a call, where it has one."""
        plan = prepared.plan
        if not prepared.in_order:
            return None
        engine.connect(plan.peers, deadline)
        boxes = engine.mailboxes(plan.peers)
        if (
            boxes is None
            or len(plan.pieces) > MAX_MESSAGES
            or not (
                plan.streams
                or (plan.is_whole and not has_long(plan, min((len(box.outgoing[0]) for box in boxes.values()), default=0)))
            )
        ):
            prepared.in_order = False
            return None
        shape = (prepared.elements,) if prepared.elements >= 0 else None
        prepared.way = Express(plan, engine.transport, boxes, dtype, shape)
        return prepared.way

    def shorten(self, key: Hashable, call: Call, shape: tuple[int, ...]) -> None:
        """Let the next call of this kind, which was just made with a result of ``shape``, take the short way, if it has one."""
        prepared = self._prepared.get(call)
        if prepared is None or prepared.way is None or key in self.shortcuts or self._job.runtime.is_simulated:
            return
        way, engine = prepared.way, prepared.engine
        if call.collective in _VECTOR and isinstance(way, Express):
            boxes = engine.mailboxes(prepared.plan.peers)
            assert boxes is not None
            way = Express(prepared.plan, engine.transport, boxes, call.dtype, shape)
        while len(self.shortcuts) >= _MAX_SHORTCUTS:
            del self.shortcuts[next(iter(self.shortcuts))]
        is_root = call.root in (-1, self._members.rank)
        kind = Kind(
            prepared.signature,
            way,
            prepared.divisor,
            call.dtype,
            shape,
            in_place=call.collective in _VECTOR,
            gives=is_root or call.collective is not Collective.BROADCAST,
            takes=is_root or call.collective is not Collective.REDUCE,
        )
        self.shortcuts[key] = Shortcut(self, self._job, self._members, self._plugins, engine.transport, kind)

    def _engine_of(self, collective: Collective) -> Engine:
        """Return what runs a collective; barriers have one of their own where the backend sends them another way."""
        if self._engine is None:
            self._engine = Engine(self._job.open_transport(self._channel))
            transport = self._job.open_barrier(self._channel)
            self._barrier = None if transport is None else Engine(transport)
        return self._barrier or self._engine if collective is Collective.BARRIER else self._engine

    def stalled(self, record: Record, signature: CallSignature, peers: list[int]) -> None:
        """Tell the store that a call waits for ``peers``."""
        wait = Wait(self._channel, record.sequence, signature.operation, signature.digest, peers, [], list(self._members.ranks))
        self._job.control.stalled(record, wait)

    def _prepare(self, call: Call) -> _Prepared:
        members = self._members
        rank, size = members.rank, members.size
        elements = int(np.prod(call.shape, dtype=np.int64)) if call.collective in _VECTOR else sum(call.counts)
        nbytes = elements * call.dtype.itemsize
        # What one rank sends in an uneven all_to_all is its own affair, and must not choose the algorithm for all.
        uneven = call.collective is Collective.ALL_TO_ALL and call.uneven is not None
        reduction = call.reduction
        ordered = reduction is not None and not reduction.commutes
        choice = self._selector.choose(
            call.collective,
            0 if uneven else nbytes,
            size,
            ranks_per_host=members.ranks_per_host,
            even=len(set(call.counts)) <= 1 and not uneven,
            # Reproducible reductions are in the order of ranks, and scans always are.
            reproducible=call.reproducible or (ordered and PROMISES[call.collective].behind is None),
        )
        root = max(call.root, 0)
        if choice.algorithm not in BUILTIN:
            # Imported here: those that come with manyhands are proved by its tests, and nobody pays for the verifier without others.
            from manyhands.config.plugins.proving import check_use

            check_use(choice.algorithm, size, root, choice.segments, members.ranks_per_host)
        schedule = _schedule(choice.algorithm, rank, size, root, choice.segments, members.ranks_per_host)
        if call.collective in _ONE_WAY and size > 1:
            # The data flow one way, from or to the root or the last rank. The barrier in their shadow makes every rank hear from every other, so
            # that none returns before all have entered the same call.
            schedule = in_parallel(schedule, dissemination(rank, size))
        signature = call.signature(algorithm=f"{choice.algorithm.name}/{choice.segments}")
        input_offsets, output_offsets = _offsets(call, schedule, choice.segments, elements, rank)
        engine = self._engine_of(call.collective)
        plan = compile_plan(
            schedule,
            signature,
            self._channel,
            input_offsets,
            output_offsets,
            call.dtype.itemsize,
            reduction,
            members.ranks,
            # What streams comes in multiples of 64 bytes, which need not be whole elements of a structured dtype.
            streams=engine.transport.streams and not 64 % max(1, call.dtype.itemsize),
        )
        op = reduction.name if reduction else None
        is_even = len(set(call.counts)) <= 1 and not uneven
        request = CollectiveRequest(
            self._job.backend_name, call.collective, "cpu", call.dtype, op, nbytes, size, is_even, signature.digest
        )
        # Natively performed collectives reduce in an order of their own, and know the world alone.
        asked = members.number == 0 and not call.reproducible and not ordered
        native = self._plugins.native_collective(request) if asked else None
        carrier = choice.algorithm.name if native is None else self._job.backend_name
        divisor = size if native is None and reduction is not None and reduction.is_mean else 1
        vector = elements if call.collective in _VECTOR else -1
        prepared = _Prepared(signature, engine, plan, carrier, nbytes, choice.algorithm.in_order, divisor, vector)
        if native is not None and self._job.backend is not None:
            prepared.way = Native(native, self._job.backend, call.root)
        while len(self._prepared) >= _MAX_PLANS:
            del self._prepared[next(iter(self._prepared))]
        self._prepared[call] = prepared
        if _log.isEnabledFor(logging.DEBUG):
            why = choice.reason if native is None else "a plugin performs it"
            _log.debug("rank %d of group %d: %s by %s: %s", rank, members.number, signature.describe(), carrier, why)
        return prepared


@lru_cache(maxsize=_MAX_SCHEDULES)
def _schedule(algorithm: Algorithm, rank: int, size: int, root: int, segments: int, ranks_per_host: int) -> Schedule:
    """Return a schedule; groups and sizes that have it in common share it."""
    return algorithm.schedule(rank, size, root, segments, ranks_per_host)


def _offsets(
    call: Call, schedule: Schedule, segments: int, elements: int, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where the chunks of ``INPUT`` and ``OUTPUT`` begin, in elements, for a schedule of this call."""
    if call.collective in _VECTOR:
        return even(elements, schedule.input_chunks), even(elements, schedule.output_chunks)
    if call.collective is Collective.BARRIER:
        return (0,), (0,)
    all_blocks = blocks(call.counts, segments)
    if call.collective is Collective.ALL_TO_ALL:
        return all_blocks, blocks(call.receive_counts, segments)
    own_block = blocks(call.counts[rank : rank + 1], segments)
    if call.collective in (Collective.ALL_GATHER, Collective.GATHER):
        return own_block, all_blocks
    return all_blocks, own_block
