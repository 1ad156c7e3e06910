"""From a request to a plan: which algorithm, or which plugin, carries it out, made ready for the sizes of the request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import lru_cache, partial

import msgspec
import numpy as np

from oneaccord.arrays.memory import Array
from oneaccord.calls.engine import CompiledSchedule, Executable, Links, Patience, compile_program
from oneaccord.calls.request import Request
from oneaccord.config.plugins import PluginManager
from oneaccord.config.select import Selector
from oneaccord.contract.backend import Backend, CollectiveRequest, NativeCollective
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import CallSignature
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job
from oneaccord.schedule.algorithms.doubling import barrier as dissemination
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.chunking import blocks, even
from oneaccord.schedule.compose import in_parallel
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.steps import Collective, Recv, RecvReduce, Schedule, Send

__all__ = ["VECTOR", "Plan", "Plans", "Way"]

_log = logging.getLogger("oneaccord.calls")

_MAX_PLANS = 512
_MAX_SCHEDULES = 1024
_ONE_WAY = frozenset(
    {Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER, Collective.SCAN, Collective.EXSCAN}
)
VECTOR: frozenset[Collective] = frozenset(
    {Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST, Collective.SCAN, Collective.EXSCAN}
)
"""Whose input and output have one shape, and may be the very same memory; schedules are proved for that as well."""


class Native:
    """A collective that a plugin performs, to be run as an `Executable` is.

    Parameters
    ----------
    native
        The function that performs it.
    backend, root
        Its arguments besides the arrays.
    """

    __slots__ = ("_backend", "_native", "_root", "takes_any_layout")

    def __init__(self, native: NativeCollective, backend: Backend, root: int) -> None:
        self._native = native
        self._backend = backend
        self._root = root
        self.takes_any_layout: bool = False

    def run(self, source: Array, target: Array, sequence: int, patience: Patience) -> None:
        """Perform it; raises as a `NativeCollective`."""
        waiter = patience()
        stall = waiter.on_stall or _ignore
        self._native(self._backend, source.reshape(-1), target.reshape(-1), self._root, waiter.deadline, stall)


Way = Executable | Native
"""The function that carries a plan out."""


class Plan(msgspec.Struct):
    """A request made ready once and run many times.

    Attributes
    ----------
    signature
        The facts on which all ranks must agree.
    links, peers
        The links that it uses, and the peers at their other ends.
    program
        Makes its program, for mailboxes of so many bytes a slot, of which messages that are not reduced use so many.
    carrier
        The name of the algorithm, or of the backend that performs it natively.
    nbytes
        The size that chose the algorithm.
    divisor
        The divisor of the result.
    way
        The function that carries it out; missing before the first run.
    """

    signature: CallSignature
    links: Links
    peers: frozenset[int]
    program: Callable[[int, int], CompiledSchedule]
    carrier: str
    nbytes: int
    divisor: int
    way: Way | None = None

    def ready(self, until: Callable[[], Deadline]) -> Way:
        """Return the function that carries it out, connected to the peers as long as ``until()`` allows."""
        if self.way is None:
            self.links.connect(self.peers, until)
            boxes, *limits = self.links.mailboxes(self.peers)
            program = self.program(*limits)
            self.way = Executable(program, self.links.transport, boxes)
        return self.way


class Plans:
    """The plans of one group: those made before, and how others are made.

    Parameters
    ----------
    job, members
        The job and the members of the group.
    plugins, selector
        The plugins that may offer native collectives, and the selector of algorithms.

    Attributes
    ----------
    made
        Those that were made, the oldest first.
    """

    def __init__(self, job: Job, members: Members, plugins: PluginManager, selector: Selector) -> None:
        self._job = job
        self._members = members
        self._channel = members.channel
        self._plugins = plugins
        self._selector = selector
        self._links: Links | None = None
        self._barrier: Links | None = None
        self.made: dict[Request, Plan] = {}
        self._making = threading.Lock()

    def of(self, request: Request) -> Plan:
        """Return the plan of a request; make it now if there is none.

        Raises
        ------
        ConfigError, PluginError
            The algorithm that was chosen does not do this.
        """
        plan = self.made.get(request)
        if plan is None:
            with self._making:  # a call in the background may be making one
                plan = self.made.get(request) or self._make(request)
        return plan

    def close(self) -> None:
        """Give back the transports; no call may follow."""
        for links in (self._links, self._barrier):
            if links is not None:
                links.transport.close()

    def _links_of(self, collective: Collective) -> Links:
        """Return the links of a collective; barriers have their own if the backend sends them another way."""
        if self._links is None:
            self._links = Links(self._job.open_transport(self._channel))
            transport = self._job.open_barrier(self._channel)
            self._barrier = None if transport is None else Links(transport)
        return self._barrier or self._links if collective is Collective.BARRIER else self._links

    def _make(self, request: Request) -> Plan:
        members = self._members
        rank, size = members.rank, members.size
        elements = int(np.prod(request.shape, dtype=np.int64)) if request.collective in VECTOR else sum(request.counts)
        nbytes = elements * request.dtype.itemsize
        # In an uneven all_to_all each rank chooses its own sizes, so they must not choose the algorithm for all.
        uneven = request.collective is Collective.ALL_TO_ALL and request.uneven is not None
        reduction = request.reduction
        ordered = reduction is not None and not reduction.commutes
        choice = self._selector.choose(
            request.collective,
            0 if uneven else nbytes,
            size,
            ranks_per_host=members.ranks_per_host,
            even=len(set(request.counts)) <= 1 and not uneven,
            # Reproducible reductions are in the order of ranks, and scans always are.
            reproducible=request.reproducible or (ordered and PROMISES[request.collective].behind is None),
        )
        root = max(request.root, 0)
        if choice.algorithm not in BUILTIN:
            # Imported here: tests prove the algorithms of oneaccord, so that a job without others need not load the verifier.
            from oneaccord.config.plugins.proving import check_use

            check_use(choice.algorithm, size, root, choice.segments, members.ranks_per_host)
        schedule = _schedule(choice.algorithm, rank, size, root, choice.segments, members.ranks_per_host)
        if request.collective in _ONE_WAY and size > 1:
            # The data flow one way, from or to the root or the last rank. With the barrier beside it, every rank hears from every other, so
            # that no rank returns before all have entered the same request.
            schedule = in_parallel(schedule, dissemination(rank, size))
        signature = request.signature(algorithm=f"{choice.algorithm.name}/{choice.segments}")
        input_offsets, output_offsets = _offsets(request, schedule, choice.segments, elements, rank)
        links = self._links_of(request.collective)
        program = partial(
            compile_program,
            schedule,
            signature,
            self._channel,
            input_offsets,
            output_offsets,
            request.dtype,
            reduction,
            members.ranks,
            request.shape if request.collective in VECTOR else None,
            links.transport.streams,
        )
        native: NativeCollective | None = None
        # Natively performed collectives reduce in an order of their own, and know the world alone.
        if self._plugins.performs and members.number == 0 and not request.reproducible and not ordered:
            op = reduction.name if reduction else None
            is_even = len(set(request.counts)) <= 1 and not uneven
            asked = CollectiveRequest(
                self._job.backend_name, request.collective, "cpu", request.dtype, op, nbytes, size, is_even, signature.digest
            )
            native = self._plugins.native_collective(asked)
        carrier = choice.algorithm.name if native is None else self._job.backend_name
        divisor = size if native is None and reduction is not None and reduction.is_mean else 1
        peers = [members.ranks[step.peer] for step in schedule.steps if isinstance(step, Send | Recv | RecvReduce)]
        made = Plan(signature, links, frozenset(peers), program, carrier, nbytes, divisor)
        if native is not None and self._job.backend is not None:
            made.way = Native(native, self._job.backend, request.root)
        while len(self.made) >= _MAX_PLANS:
            del self.made[next(iter(self.made))]
        self.made[request] = made
        if _log.isEnabledFor(logging.DEBUG):
            why = choice.reason if native is None else "a plugin performs it"
            _log.debug("rank %d of %s: %s by %s: %s", rank, members.name, signature.describe(), carrier, why)
        return made


@lru_cache(maxsize=_MAX_SCHEDULES)
def _schedule(algorithm: Algorithm, rank: int, size: int, root: int, segments: int, ranks_per_host: int) -> Schedule:
    """Return a schedule; groups and sizes that have it in common share it."""
    build, where = algorithm.build, (ranks_per_host,) if algorithm.by_host else ()
    return build(rank, size, root, segments, *where)


def _offsets(
    request: Request, schedule: Schedule, segments: int, elements: int, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets of the chunks of ``INPUT`` and ``OUTPUT``, in elements, for a schedule of this request."""
    if request.collective in VECTOR:
        if schedule.input_chunks == schedule.output_chunks == 1:
            return (0, elements), (0, elements)
        return even(elements, schedule.input_chunks), even(elements, schedule.output_chunks)
    if request.collective is Collective.BARRIER:
        return (0,), (0,)
    all_blocks = blocks(request.counts, segments)
    if request.collective is Collective.ALL_TO_ALL:
        return all_blocks, blocks(request.receive_counts, segments)
    own_block = blocks(request.counts[rank : rank + 1], segments)
    if request.collective in (Collective.ALL_GATHER, Collective.GATHER):
        return own_block, all_blocks
    return all_blocks, own_block


def _ignore(_peers: list[int]) -> None:
    pass
