"""From the arguments of a call to what runs when its turn comes: all that can be wrong with a call alone is found here, at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from manyhands.arguments import Arguments
from manyhands.arrays import NOTHING, Array, check_out, contiguous, handed_over, placed, to_array
from manyhands.checks import said
from manyhands.collectives import Call, Collectives
from manyhands.deadline import Deadline
from manyhands.dtypes import Op, check_dtype, dtype_code, dtype_from_code, resolve_op
from manyhands.errors import LayoutError, ManyHandsError, SizeMismatchError, UsageError
from manyhands.job import Job
from manyhands.members import Members
from manyhands.peers import Peers
from manyhands.plugins import PluginManager
from manyhands.rendezvous.messages import Report
from manyhands.schedule.steps import Collective
from manyhands.select import Selector
from manyhands.wire import MAX_DIMENSIONS

__all__ = ["Action", "Operations"]

Action = Callable[[Deadline], Array]
"""What runs when a call's turn comes, and gives its result."""

_INT64 = np.dtype(np.int64)
_MAY_ALIAS = frozenset({Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST})
"""Where input and output may be the very same memory; schedules are proved for that as well."""


class Operations:
    """The calls of one group. Collectives take turns; `peers` has lanes of its own.

    Parameters
    ----------
    job, members
        Where the group lives, and who belongs to it.
    plugins, selector
        Who may offer native collectives, and who chooses algorithms.
    reproducible
        Whether reductions are reproducible where a call does not say.
    """

    def __init__(self, job: Job, members: Members, plugins: PluginManager, selector: Selector, *, reproducible: bool) -> None:
        self.arguments: Arguments = Arguments(members)
        self.collectives: Collectives = Collectives(job, members, plugins, selector)
        self.peers: Peers = Peers(job, members)
        self._job = job
        self._members = members
        self._rank = members.rank
        self._reproducible = reproducible

    def all_reduce(self, array: npt.ArrayLike, op: Op, out: Array | None, reproducible: bool | None) -> Action:
        """Prepare `Group.all_reduce`."""
        source = to_array(array)
        call = Call(
            Collective.ALL_REDUCE,
            source.dtype,
            source.shape,
            reduction=resolve_op(op, source.dtype),
            reproducible=self._fixed(reproducible),
        )
        action = self._into(call, source, source.shape, out)
        return self._shortened(("all_reduce", op, reproducible), array, call, source.shape, action)

    def reduce(self, array: npt.ArrayLike, op: Op, root: int, out: Array | None, reproducible: bool | None) -> Action:
        """Prepare `Group.reduce`."""
        source = to_array(array)
        root = self.arguments.rank(root, "root")
        call = Call(
            Collective.REDUCE,
            source.dtype,
            source.shape,
            reduction=resolve_op(op, source.dtype),
            root=root,
            reproducible=self._fixed(reproducible),
        )
        action = self._into(call, source, source.shape, out) if self._rank == root else self._nowhere(call, source)
        return self._shortened(("reduce", op, reproducible, root, int), array, call, source.shape, action)

    def broadcast(self, array: npt.ArrayLike, root: int, out: Array | None) -> Action:
        """Prepare `Group.broadcast`."""
        source = to_array(array)
        call = Call(Collective.BROADCAST, source.dtype, source.shape, root=self.arguments.rank(root, "root"))
        action = self._into(call, source if self._rank == call.root else np.empty(0, source.dtype), source.shape, out)
        return self._shortened(("broadcast", call.root, int), array, call, source.shape, action)

    def all_gather(self, array: npt.ArrayLike, counts: Sequence[int] | None, out: Array | None) -> Action:
        """Prepare `Group.all_gather`."""
        source, call, shape = self._gathering(Collective.ALL_GATHER, array, counts, -1)
        action = self._into(call, source, shape, out)
        return action if counts is not None else self._shortened(("all_gather",), array, call, shape, action)

    def gather(self, array: npt.ArrayLike, root: int, counts: Sequence[int] | None, out: Array | None) -> Action:
        """Prepare `Group.gather`."""
        root = self.arguments.rank(root, "root")
        source, call, shape = self._gathering(Collective.GATHER, array, counts, root)
        return self._into(call, source, shape, out) if self._rank == root else self._nowhere(call, source)

    def scatter(self, array: npt.ArrayLike | None, root: int, counts: Sequence[int] | None, out: Array | None) -> Action:
        """Prepare `Group.scatter`: the root's dtype and shape travel first."""
        root = self.arguments.rank(root, "root")
        source = NOTHING
        description = np.zeros(2 + MAX_DIMENSIONS, _INT64)
        if self._rank == root:
            if array is None:
                raise LayoutError("scatter needs an array on the root, and None was given")
            source = self.arguments.message(array)
            self.arguments.blocks(source, counts, "scatter")
            description[:2] = dtype_code(source.dtype), source.ndim
            description[2 : 2 + source.ndim] = source.shape
        uneven = None if counts is None else self.arguments.counts(counts)
        about = Call(
            Collective.BROADCAST, _INT64, description.shape, root=root, uneven=uneven, operation="scatter", part="shape"
        )

        def action(deadline: Deadline) -> Array:
            self.collectives.run(about, description if self._rank == root else np.empty(0, _INT64), description, deadline)
            return self._rest("scatter", lambda: hand_out(deadline))

        def hand_out(deadline: Deadline) -> Array:
            dtype = dtype_from_code(int(description[0]))
            shape = tuple(int(n) for n in description[2 : 2 + int(description[1])])
            if dtype is None:
                raise self._give_up("the root scatters an array whose dtype needs ml_dtypes: pip install ml_dtypes")
            per_rank = self.arguments.divide(shape[0], uneven)
            part_shape = (per_rank[self._rank], *shape[1:])
            if out is not None:
                try:
                    check_out(out, part_shape, dtype)
                except UsageError as error:
                    raise self._give_up(f"rank {self._rank} cannot take its part of scatter: {error}") from error
            row = math.prod(shape[1:])
            sizes = tuple(n * row for n in per_rank)
            call = Call(Collective.SCATTER, dtype, shape, counts=sizes, root=root, uneven=tuple(per_rank))
            return self._into(call, source if self._rank == root else np.empty(0, dtype), part_shape, out)(deadline)

        return action

    def reduce_scatter(
        self, array: npt.ArrayLike, op: Op, counts: Sequence[int] | None, out: Array | None, reproducible: bool | None
    ) -> Action:
        """Prepare `Group.reduce_scatter`."""
        source = to_array(array)
        per_rank, sizes = self.arguments.blocks(source, counts, "reduce_scatter")
        call = Call(
            Collective.REDUCE_SCATTER,
            source.dtype,
            source.shape,
            counts=sizes,
            reduction=resolve_op(op, source.dtype),
            uneven=None if counts is None else per_rank,
            reproducible=self._fixed(reproducible),
        )
        shape = (per_rank[self._rank], *source.shape[1:])
        action = self._into(call, source, shape, out)
        return (
            action if counts is not None else self._shortened(("reduce_scatter", op, reproducible), array, call, shape, action)
        )

    def all_to_all(
        self,
        array: npt.ArrayLike,
        send_counts: Sequence[int] | None,
        receive_counts: Sequence[int] | None,
        out: Array | None,
    ) -> Action:
        """Prepare `Group.all_to_all`: where counts are given they travel first, so that every rank knows what it gets."""
        source = to_array(array)
        if receive_counts is not None and send_counts is None:
            raise SizeMismatchError("all_to_all was given receive_counts without send_counts: give send_counts on all ranks")
        per_rank, sizes = self.arguments.blocks(source, send_counts, "all_to_all")
        if send_counts is None:
            call = Call(Collective.ALL_TO_ALL, source.dtype, source.shape, counts=sizes, receive_counts=sizes)
            return self._shortened(("all_to_all",), array, call, source.shape, self._into(call, source, source.shape, out))
        expected = None if receive_counts is None else self.arguments.counts(receive_counts)
        source = contiguous(source)
        ones = (1,) * self._members.size
        about = Call(Collective.ALL_TO_ALL, _INT64, (), counts=ones, receive_counts=ones, operation="all_to_all", part="counts")
        row = math.prod(source.shape[1:])

        def action(deadline: Deadline) -> Array:
            incoming = np.empty(self._members.size, _INT64)
            self.collectives.run(about, np.array(per_rank, _INT64), incoming, deadline)
            return self._rest("all_to_all", lambda: exchange(incoming, deadline))

        def exchange(incoming: Array, deadline: Deadline) -> Array:
            received = tuple(incoming.tolist())
            if expected is not None and received != expected:
                raise self._give_up(
                    f"in all_to_all rank {self._rank} expects receive_counts={list(expected)}, and the others send it {list(received)}"
                )
            shape = (sum(received), *source.shape[1:])
            if out is not None:
                try:
                    check_out(out, shape, source.dtype)
                except UsageError as error:
                    raise self._give_up(f"rank {self._rank} cannot take what all_to_all brings: {error}") from error
            # Axis 0 differs from rank to rank, so that only the rest of the shape can be compared.
            call = Call(
                Collective.ALL_TO_ALL,
                source.dtype,
                source.shape[1:],
                counts=sizes,
                receive_counts=tuple(n * row for n in received),
                uneven=(),
            )
            return self._into(call, source, shape, out)(deadline)

        return action

    def barrier(self) -> Action:
        """Prepare `Group.barrier`."""
        call = Call(Collective.BARRIER, NOTHING.dtype, NOTHING.shape)
        return self._shortened(("barrier",), NOTHING, call, NOTHING.shape, self._nowhere(call, NOTHING))

    # Point to point

    def send(self, array: npt.ArrayLike, dest: int, *, has_turn: bool = False) -> Action:
        """Prepare `Group.send`."""
        source = self.arguments.message(array)
        peer = self._members.ranks[self.arguments.peer(dest, "dest")]
        return lambda deadline: self.peers.exchange(source, peer, None, None, deadline, has_turn=has_turn)

    def recv(self, source: int, out: Array | None, *, has_turn: bool = False) -> Action:
        """Prepare `Group.recv`."""
        return self._receive(None, None, source, out, has_turn=has_turn)

    def sendrecv(self, array: npt.ArrayLike, dest: int, source: int, out: Array | None) -> Action:
        """Prepare `Group.sendrecv`."""
        outgoing = self.arguments.message(array)
        return self._receive(outgoing, self.arguments.peer(dest, "dest"), source, out, has_turn=False)

    def _receive(self, outgoing: Array | None, dest: int | None, source: int, out: Array | None, *, has_turn: bool) -> Action:
        ranks = self._members.ranks
        to = None if dest is None else ranks[dest]
        origin = ranks[self.arguments.peer(source, "source")]
        if out is not None:
            check_out(out, getattr(out, "shape", ()), getattr(out, "dtype", _INT64))
            check_dtype(out.dtype)
            if outgoing is not None and np.may_share_memory(outgoing, out):
                outgoing = outgoing.copy()
        target = out if out is None or out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        return lambda deadline: handed_over(self.peers.exchange(outgoing, to, origin, target, deadline, has_turn=has_turn), out)

    def close(self) -> None:
        """Give back the transports; no call may follow."""
        self.collectives.close()
        self.peers.close()

    # What they have in common

    def _fixed(self, reproducible: bool | None) -> bool:
        return self._reproducible if reproducible is None else bool(reproducible)

    def _into(self, call: Call, source: Array, shape: tuple[int, ...], out: Array | None) -> Action:
        """Prepare a call whose result this rank gets."""
        memory, target = placed(source, shape, call.dtype, out, may_alias=call.collective in _MAY_ALIAS)

        def action(deadline: Deadline) -> Array:
            self.collectives.run(call, memory, target, deadline)
            return handed_over(target, out)

        return action

    def _nowhere(self, call: Call, source: Array) -> Action:
        """Prepare a call whose result this rank does not get."""
        memory, nothing = contiguous(source), np.empty(0, call.dtype)

        def action(deadline: Deadline) -> Array:
            self.collectives.run(call, memory, nothing, deadline)
            return nothing

        return action

    def _shortened(
        self, kind: tuple[object, ...], array: npt.ArrayLike, call: Call, shape: tuple[int, ...], action: Action
    ) -> Action:
        """Prepare a call with a result of ``shape``, after which others of its kind take the short way."""
        if type(array) is not np.ndarray:
            return action
        key = (kind, array.dtype, array.shape)

        def then(deadline: Deadline) -> Array:
            result = action(deadline)
            self.collectives.shorten(key, call, shape)
            return result

        return then

    def _gathering(
        self, collective: Collective, array: npt.ArrayLike, counts: Sequence[int] | None, root: int
    ) -> tuple[Array, Call, tuple[int, ...]]:
        """Return what all_gather and gather have in common: the input, the call, and the shape of the result."""
        source = to_array(array)
        if source.ndim == 0:
            source = source.reshape(1)
        per_rank, rest = self.arguments.own_rows(source, counts), source.shape[1:]
        row = math.prod(rest)
        call = Call(
            collective,
            source.dtype,
            source.shape if counts is None else rest,
            counts=tuple(n * row for n in per_rank),
            root=root,
            uneven=None if counts is None else per_rank,
        )
        return source, call, (sum(per_rank), *rest)

    def _rest(self, what: str, rest: Callable[[], Array]) -> Array:
        """Do the second part of a call, for which the other ranks wait: whatever goes wrong here, they must learn of it."""
        try:
            return rest()
        except ManyHandsError:
            raise
        except BaseException as error:
            text = f"rank {self._job.rank} broke off {what} with {type(error).__name__}: {said(error)}"
            self._job.fail(Report("aborted", text, peer=self._job.rank, members=list(self._members.ranks)))
            raise

    def _give_up(self, text: str) -> ManyHandsError:
        """End the job for a mismatch that this rank alone can see; return the error to raise."""
        return self._job.fail(Report("mismatch", text, peer=self._job.rank, members=list(self._members.ranks)))
