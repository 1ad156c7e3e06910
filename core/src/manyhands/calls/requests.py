"""From the arguments of a call to what runs when its turn comes: all that can be wrong with a call alone is found here, at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from manyhands.arrays.buffers import Give, Memory, Taken, Taking
from manyhands.arrays.dtypes import OpLike, Reduction, identity_of, resolve_op
from manyhands.arrays.libraries import DeviceArray, Library, device_library, device_number, present
from manyhands.arrays.memory import NOTHING, Array, check_out, contiguous, handed_over, placed
from manyhands.calls.arguments import Arguments
from manyhands.calls.devices.actions import STRIDED, DeviceAction, begin, check_arrays, check_device_out, collective
from manyhands.calls.devices.calls import Devices
from manyhands.calls.failures import check_usable, meet
from manyhands.calls.host import Call, Collectives
from manyhands.calls.inputs import Inputs
from manyhands.calls.messages import Peers
from manyhands.common.checks import said
from manyhands.config import Settings
from manyhands.config.plugins import PluginManager
from manyhands.config.select import Selector
from manyhands.contract.deadline import Deadline
from manyhands.contract.device import DeviceChannel, DeviceEvent
from manyhands.control.protocol import Report
from manyhands.control.signatures import DESCRIPTION_BYTES, CallSignature, pack_description, parse_description
from manyhands.errors import CommError, LayoutError, ManyHandsError, SizeMismatchError, UnsupportedError, UsageError
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job
from manyhands.schedule.steps import Collective

__all__ = ["Action", "Operations", "Traded"]

T = TypeVar("T")

Action = Callable[[Deadline], Any]
"""What runs when a call's turn comes, and gives its result."""

_HOST = frozenset({"cpu"})
_INT64 = np.dtype(np.int64)
_MAY_ALIAS = frozenset({Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST, Collective.SCAN, Collective.EXSCAN})
"""Where input and output may be the very same memory; schedules are proved for that as well."""


class Traded:
    """A call on devices whose ranks first tell each other, on the host, what they are about to do.

    Parameters
    ----------
    trade
        ``trade(deadline)`` does so, and returns the rest.
    devices
        The group's calls on devices.
    arrays
        The arrays that the call is given.
    rest
        Does what comes after the first step, for which the other ranks wait, so that they learn of whatever goes wrong.
    """

    def __init__(
        self,
        trade: Callable[[Deadline], Action],
        devices: Devices,
        arrays: list[DeviceArray],
        rest: Callable[[Callable[[], Action]], Action],
    ) -> None:
        self._trade = trade
        self._rest = rest
        self._devices = devices
        self._arrays = arrays
        self._starts: list[DeviceEvent] = []
        self._streams: list[tuple[Library, Any]] = []

    def __call__(self, deadline: Deadline) -> Any:
        """Make the call, on the caller's stream."""
        return self._trade(deadline)(deadline)

    def begin(self) -> None:
        """Note, in the caller's thread, its streams and what they have queued so far; raises as `DeviceAction.begin`."""
        if not all(array.is_contiguous for array in self._arrays):
            raise LayoutError(STRIDED)
        channel = self._devices.channel
        if channel is None:
            return
        # What the root scatters is not known yet, nor whose array this rank will get.
        libraries = [self._arrays[0].library] if self._arrays else present()
        self._starts = begin(self._devices, libraries)
        self._streams = [(library, library.stream(channel.device)[1]) for library in libraries]

    def trade(self, deadline: Deadline) -> Action:
        """Do the first step in another thread, and return the rest, whose memory belongs to the caller's stream."""
        device = -1 if self._devices.channel is None else self._devices.channel.device
        with ExitStack() as blocks:
            for library, keep in self._streams:
                blocks.enter_context(library.using(keep, device))
            rest = self._trade(deadline)
            return self._rest(lambda: self._begun(rest))

    def _begun(self, rest: Action) -> Action:
        if isinstance(rest, DeviceAction) and not rest.is_copy:
            # Also behind what that stream may still do with memory that it has just given out again.
            rest.starts = [*self._starts, *begin(self._devices, [rest.library])]
        return rest


class Operations:
    """The calls of one group. Collectives take turns; `peers` has lanes of its own.

    Parameters
    ----------
    job, members
        Where the group lives, and who belongs to it.
    plugins, selector
        Who may offer native collectives, and who chooses algorithms.
    channel
        What moves the group's device memory; None where the backend moves none.
    settings
        The config.
    """

    def __init__(
        self,
        job: Job,
        members: Members,
        plugins: PluginManager,
        selector: Selector,
        channel: DeviceChannel | None,
        settings: Settings,
    ) -> None:
        self.arguments: Arguments = Arguments(members)
        self.collectives: Collectives = Collectives(job, members, plugins, selector)
        self.peers: Peers = Peers(job, members)
        self._job = job
        self._members = members
        self._rank = members.rank
        self.devices: Devices = Devices(job, members, plugins, self.collectives, channel, always=settings.gpu_check == "always")
        memory = _HOST if job.backend is None else job.backend.memory
        messages = memory if job.backend is None else job.backend.message_memory
        # A world of one copies.
        alone = members.size == 1 and job.backend is None
        self._moves_host = "cpu" in memory
        self.take: Taking = Taking(serves_devices=alone or "cuda" in memory, fallback=settings.gpu_fallback)
        routed = " here (backends.hybrid.routes.p2p; without it, arrays on GPUs go with their collectives)"
        self.take_message: Taking = Taking(
            serves_devices=alone or "cuda" in messages,
            fallback=settings.gpu_fallback,
            why=routed if "cuda" in memory - messages else "",
        )
        self._reproducible = settings.reproducible
        watches = settings.check_inputs or job.runtime.is_simulated
        self.inputs: Inputs | None = Inputs(job, members) if watches else None

    def all_reduce(self, array: npt.ArrayLike, op: OpLike, out: Array | None, reproducible: bool | None) -> Action:
        """Prepare `Group.all_reduce`."""
        return self.all_reduce_of(self.take("all_reduce", array, out), array, op, reproducible)

    def all_reduce_of(self, taken: Taken, array: npt.ArrayLike, op: OpLike, reproducible: bool | None) -> Action:
        """Prepare `Group.all_reduce` of an array that was taken before."""
        source, target, give = taken
        call = Call(
            Collective.ALL_REDUCE,
            source.dtype,
            source.shape,
            reduction=self._reduction(op, source),
            reproducible=self._fixed(reproducible),
        )
        action = self._into(call, source, source.shape, target, give)
        return self._shortened(("all_reduce", op, reproducible), array, call, source.shape, action)

    def reduce(self, array: npt.ArrayLike, op: OpLike, root: int, out: Array | None, reproducible: bool | None) -> Action:
        """Prepare `Group.reduce`."""
        root = self.arguments.rank(root, "root")
        source, target, give = self.take("reduce", array, out)
        call = Call(
            Collective.REDUCE,
            source.dtype,
            source.shape,
            reduction=self._reduction(op, source),
            root=root,
            reproducible=self._fixed(reproducible),
        )
        action = self._into(call, source, source.shape, target, give) if self._rank == root else self._nowhere(call, source)
        return self._shortened(("reduce", op, reproducible, root, int), array, call, source.shape, action)

    def broadcast(self, array: npt.ArrayLike | None, root: int, out: Array | None) -> Action:
        """Prepare `Group.broadcast`."""
        if array is None:
            number = self.arguments.rank(root, "root")
            remedy = (
                "give what is to be sent"
                if self._rank == number
                else f"give every rank an array of the shape and dtype that rank {number} sends, such as np.empty(shape, dtype), or use "
                "broadcast_object"
            )
            raise LayoutError(f"broadcast was given None instead of an array: {remedy}", rank=self._job.rank)
        source, target, give = self.take("broadcast", array, out)
        call = Call(Collective.BROADCAST, source.dtype, source.shape, root=self.arguments.rank(root, "root"))
        sent = source if self._rank == call.root or isinstance(source, DeviceArray) else np.empty(0, source.dtype)
        action = self._into(call, sent, source.shape, target, give)
        return self._shortened(("broadcast", call.root, int), array, call, source.shape, action)

    def all_gather(self, array: npt.ArrayLike, counts: Sequence[int] | None, out: Array | None, *, uneven: bool) -> Action:
        """Prepare `Group.all_gather`."""
        source, target, give = self.take("all_gather", array, out)
        if uneven:
            return self._gathering_uneven(Collective.ALL_GATHER, source, counts, target, give, -1)
        source, call, shape = self._gathering(Collective.ALL_GATHER, source, counts, -1)
        action = self._into(call, source, shape, target, give)
        return action if counts is not None else self._shortened(("all_gather",), array, call, shape, action)

    def gather(
        self, array: npt.ArrayLike, root: int, counts: Sequence[int] | None, out: Array | None, *, uneven: bool
    ) -> Action:
        """Prepare `Group.gather`."""
        root = self.arguments.rank(root, "root")
        source, target, give = self.take("gather", array, out)
        if uneven:
            return self._gathering_uneven(Collective.GATHER, source, counts, target, give, root)
        source, call, shape = self._gathering(Collective.GATHER, source, counts, root)
        return self._into(call, source, shape, target, give) if self._rank == root else self._nowhere(call, source)

    def scatter(self, array: npt.ArrayLike | None, root: int, counts: Sequence[int] | None, out: Array | None) -> Action:
        """Prepare `Group.scatter`: the root's dtype and shape travel first."""
        root = self.arguments.rank(root, "root")
        source: Memory = NOTHING
        description = np.zeros(1 + DESCRIPTION_BYTES // 8, _INT64)  # what kind of memory, and then a description
        if self._rank == root:
            if array is None:
                raise LayoutError("scatter needs an array on the root, and None was given")
            source, target, give = self.take("scatter", array, out)
            self.arguments.check_dimensions(source)
            self.arguments.blocks(source, counts, "scatter")
            source = _in_order(source)
            description[0] = device_number(source.library) if isinstance(source, DeviceArray) else 0
            description[1:] = np.frombuffer(pack_description(source.dtype, source.shape), _INT64)
        else:
            target, give = self.take.receiving("scatter", out)
        uneven = None if counts is None else self.arguments.counts(counts)
        about = Call(
            Collective.BROADCAST, _INT64, description.shape, root=root, uneven=uneven, operation="scatter", part="shape"
        )

        def trade(deadline: Deadline) -> Action:
            if self._moves_host:
                sent = description if self._rank == root else np.empty(0, _INT64)
                self.collectives.run(about, sent, description, deadline)
            else:
                alike = f"root={root}" + ("" if uneven is None else f" and counts={list(uneven)}")
                cards = self._trade("scatter", description.tobytes() if self._rank == root else b"", deadline, alike)
                description[:] = self._numbers("scatter", root, cards[root], description.size)
            return self._rest("scatter", hand_out)

        def hand_out() -> Action:
            dtype, shape, _ = parse_description(description[1:].tobytes())
            if dtype is None:
                raise self._give_up("the root scatters an array whose dtype needs ml_dtypes: pip install ml_dtypes")
            per_rank = self.arguments.divide(shape[0], uneven)
            part_shape = (per_rank[self._rank], *shape[1:])
            try:
                self._check_out(target, part_shape, dtype)
            except UsageError as error:
                raise self._give_up(f"rank {self._rank} cannot take its part of scatter: {error}") from error
            row = math.prod(shape[1:])
            sizes = tuple(n * row for n in per_rank)
            call = Call(Collective.SCATTER, dtype, shape, counts=sizes, root=root, uneven=tuple(per_rank))
            memory = source
            if self._rank != root:
                memory = np.empty(0, dtype)
                if description[0]:
                    if self.devices.channel is None or (target is not None and not isinstance(target, DeviceArray)):
                        raise self._give_up(f"rank {self._rank} cannot take its part of scatter: the root's array is on a GPU")
                    library = device_library(int(description[0])) if target is None else target.library
                    memory = library.empty((0,), dtype, self.devices.channel.device)
                elif isinstance(target, DeviceArray):
                    raise self._give_up(
                        f"rank {self._rank} cannot take its part of scatter: out= is on a GPU, and the root's array is not"
                    )
            return self._into(call, memory, part_shape, target, give, is_agreed=True)

        return self._in_two_steps("scatter", trade, [source, target], may_be_on_device=self.devices.channel is not None)

    def reduce_scatter(
        self, array: npt.ArrayLike, op: OpLike, counts: Sequence[int] | None, out: Array | None, reproducible: bool | None
    ) -> Action:
        """Prepare `Group.reduce_scatter`."""
        source, target, give = self.take("reduce_scatter", array, out)
        per_rank, sizes = self.arguments.blocks(source, counts, "reduce_scatter")
        call = Call(
            Collective.REDUCE_SCATTER,
            source.dtype,
            source.shape,
            counts=sizes,
            reduction=self._reduction(op, source),
            uneven=None if counts is None else per_rank,
            reproducible=self._fixed(reproducible),
        )
        shape = (per_rank[self._rank], *source.shape[1:])
        action = self._into(call, source, shape, target, give)
        return (
            action if counts is not None else self._shortened(("reduce_scatter", op, reproducible), array, call, shape, action)
        )

    def scan(
        self, collective: Collective, array: npt.ArrayLike, op: OpLike, out: Array | None, reproducible: bool | None
    ) -> Action:
        """Prepare `Group.scan` or `Group.exscan`; what rank 0 gets of the latter comes from no rank."""
        source, target, give = self.take(collective.value, array, out)
        if isinstance(source, DeviceArray):
            raise UnsupportedError(
                f"{collective.value} is not there for arrays on GPUs: copy the array to the host, and give that"
            )
        reduction, fixed = self._reduction(op, source), self._fixed(reproducible)
        if reduction.is_mean:
            raise UsageError(f'{collective.value} has no op="mean": use op="sum", and divide by the number of ranks')
        identity = identity_of(op, source.dtype) if collective is Collective.EXSCAN else None  # on all ranks, to refuse alike
        call = Call(collective, source.dtype, source.shape, reduction=reduction, reproducible=fixed)
        if identity is not None and self._rank == 0:
            return self._into(call, source, source.shape, target, give, identity=identity)
        action = self._into(call, source, source.shape, target, give)
        return self._shortened((collective.value, op, reproducible), array, call, source.shape, action)

    def all_to_all(
        self,
        array: npt.ArrayLike,
        send_counts: Sequence[int] | None,
        receive_counts: Sequence[int] | None,
        out: Array | None,
    ) -> Action:
        """Prepare `Group.all_to_all`: where counts are given they travel first, so that every rank knows what it gets."""
        source, target, give = self.take("all_to_all", array, out)
        if receive_counts is not None and send_counts is None:
            raise SizeMismatchError("all_to_all was given receive_counts without send_counts: give send_counts on all ranks")
        per_rank, sizes = self.arguments.blocks(source, send_counts, "all_to_all")
        if send_counts is None:
            call = Call(Collective.ALL_TO_ALL, source.dtype, source.shape, counts=sizes, receive_counts=sizes)
            action = self._into(call, source, source.shape, target, give)
            return self._shortened(("all_to_all",), array, call, source.shape, action)
        expected = None if receive_counts is None else self.arguments.counts(receive_counts, "receive_counts")
        source = _in_order(source)
        row = math.prod(source.shape[1:])

        ones = (1,) * self._members.size
        about = Call(Collective.ALL_TO_ALL, _INT64, (), counts=ones, receive_counts=ones, operation="all_to_all", part="counts")

        def trade(deadline: Deadline) -> Action:
            incoming = self._trade_counts(about, np.array(per_rank, _INT64), source, deadline)
            return self._rest("all_to_all", lambda: exchange(incoming))

        def exchange(incoming: Array) -> Action:
            received = tuple(incoming.tolist())
            if expected is not None and received != expected:
                raise self._give_up(
                    f"in all_to_all rank {self._rank} expects receive_counts={list(expected)}, and the others send it {list(received)}"
                )
            shape = (sum(received), *source.shape[1:])
            self._check_late("all_to_all", target, shape, source.dtype)
            # Axis 0 differs from rank to rank, so that only the rest of the shape can be compared.
            call = Call(
                Collective.ALL_TO_ALL,
                source.dtype,
                source.shape[1:],
                counts=sizes,
                receive_counts=tuple(n * row for n in received),
                uneven=(),
            )
            return self._into(call, source, shape, target, give, is_agreed=True)

        return self._in_two_steps("all_to_all", trade, [source, target])

    def barrier(self) -> Action:
        """Prepare `Group.barrier`."""
        if not self._moves_host:

            def meet_all(deadline: Deadline) -> Array:
                self._trade("barrier", b"", deadline)
                return NOTHING

            return meet_all
        call = Call(Collective.BARRIER, NOTHING.dtype, NOTHING.shape)
        return self._shortened(("barrier",), NOTHING, call, NOTHING.shape, self._nowhere(call, NOTHING))

    def close(self) -> None:
        """Give back the transports; no call may follow."""
        self.devices.close()
        self.collectives.close()
        self.peers.close()

    # What they have in common

    def _reduction(self, op: OpLike, source: Memory) -> Reduction:
        return resolve_op(op, source.dtype, source if isinstance(source, np.ndarray) else None)

    def _fixed(self, reproducible: bool | None) -> bool:
        return self._reproducible if reproducible is None else bool(reproducible)

    def _into(
        self,
        call: Call,
        source: Memory,
        shape: tuple[int, ...],
        out: Memory | None,
        give: Give | None,
        *,
        is_agreed: bool = False,
        identity: Array | None = None,
    ) -> Action:
        """Prepare a call whose result this rank gets; from no rank where it is an ``identity``."""
        may_alias = call.collective in _MAY_ALIAS
        if isinstance(source, DeviceArray):
            assert out is None or isinstance(out, DeviceArray)
            return collective(self.devices, call, source, shape, out, give, may_alias=may_alias, is_agreed=is_agreed)
        assert not isinstance(out, DeviceArray)
        memory, target = placed(source, shape, call.dtype, out, may_alias=may_alias)

        def action(deadline: Deadline) -> Any:
            self.collectives.run(call, memory, target, deadline)
            if identity is not None:
                target[...] = identity
            return handed_over(target, out)

        return action if give is None else lambda deadline: give(action(deadline))

    def _nowhere(self, call: Call, source: Memory, *, is_agreed: bool = False) -> Action:
        """Prepare a call whose result this rank does not get."""
        if isinstance(source, DeviceArray):
            return collective(self.devices, call, source, None, None, None, may_alias=False, is_agreed=is_agreed)
        memory, nothing = contiguous(source), np.empty(0, call.dtype)

        def action(deadline: Deadline) -> Array:
            self.collectives.run(call, memory, nothing, deadline)
            return nothing

        return action

    def _check_out(self, out: Memory | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if isinstance(out, DeviceArray):
            check_device_out(out, shape, dtype)
        elif out is not None:
            check_out(out, shape, dtype)

    def _check_late(self, what: str, out: Memory | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Check ``out=`` where only what the other ranks told says what it must be, and they count on this one: end the job if it does not fit."""
        try:
            self._check_out(out, shape, dtype)
        except UsageError as error:
            raise self._give_up(f"rank {self._rank} cannot take what {what} brings: {error}") from error

    def _trade(self, what: str, card: bytes, deadline: Deadline, alike: str = "") -> list[bytes]:
        """Trade cards with all members through the store, for what moves no host memory; ``alike`` is what none may have otherwise."""
        check_usable(self._job, self._members.number, what, self.collectives.sequence)
        collectives, members = self.collectives, self._members
        sequence = collectives.sequence
        signature = CallSignature(what, part="meeting")
        name = f"{what} #{sequence} of group {members.number}"
        cards, _ = meet(self._job, members, name, alike.encode() + b"\0" + card, members.ranks, deadline, (signature, sequence))
        collectives.sequence = self._job.control.progress.calls[members.channel] = sequence + 1
        told = [each.partition(b"\0") for each in cards]
        for rank, (theirs, _, _) in enumerate(told):
            if theirs != alike.encode():
                raise self._give_up(
                    f"in {what} rank {self._rank} has {alike}, and rank {rank} has {theirs.decode(errors='replace')}"
                )
        return [each for _, _, each in told]

    def _numbers(self, what: str, rank: int, card: bytes, count: int) -> Array:
        """Return the integers on a rank's card; end the job where there are not so many."""
        if len(card) == count * _INT64.itemsize:
            return np.frombuffer(card, _INT64)
        peer = self._members.ranks[rank]
        text = f"rank {peer} told the other ranks {len(card)} bytes in {what}, and {count * _INT64.itemsize} are right"
        raise self._job.fail(Report("protocol", text, peer, members=list(self._members.ranks)))

    def _trade_counts(self, about: Call, mine: Array, source: Memory, deadline: Deadline) -> Array:
        """Tell the ranks how many rows of ``source`` come from this one: to each its number, or the same to all; return what they tell."""
        if isinstance(source, DeviceArray):
            root = f" for root={about.root}" if about.root >= 0 else ""
            rows = f"{source.dtype} rows of shape {list(source.shape[1:])}{root}"
            cards = self._trade(about.operation, mine.tobytes(), deadline, rows)
            place = self._rank if mine.size > 1 else 0
            told = [self._numbers(about.operation, rank, card, mine.size) for rank, card in enumerate(cards)]
            return np.array([each[place] for each in told], _INT64)
        incoming = np.empty(self._members.size, _INT64)
        self.collectives.run(about, mine, incoming, deadline)
        return incoming

    def _shortened(
        self, kind: tuple[object, ...], array: npt.ArrayLike, call: Call, shape: tuple[int, ...], action: Action
    ) -> Action:
        """Prepare a call with a result of ``shape``, after which others of its kind take the short way."""
        if isinstance(action, DeviceAction):
            name: Any = array
            library, in_place = action.library, call.collective in _MAY_ALIAS
            if action.takes and library.is_stream_ordered:
                place = (kind, type(array), name.dtype, name.shape)
                action.then = lambda: self.devices.shorten(place, call, shape, library, in_place=in_place)
            return action
        if type(array) is not np.ndarray:
            return action
        key = (kind, array.dtype, array.shape)

        def then(deadline: Deadline) -> Any:
            result = action(deadline)
            self.collectives.shorten(key, call, shape)
            return result

        return then

    def _gathering(
        self, collective: Collective, source: Memory, counts: Sequence[int] | None, root: int
    ) -> tuple[Memory, Call, tuple[int, ...]]:
        """Return what all_gather and gather have in common: the input, the call, and the shape of the result."""
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

    def _gathering_uneven(
        self,
        collective: Collective,
        source: Memory,
        counts: Sequence[int] | None,
        out: Memory | None,
        give: Give | None,
        root: int,
    ) -> Action:
        """Prepare an all_gather or a gather of arrays of any lengths: these travel first, and then it is one with counts."""
        what = collective.value
        if counts is not None:
            raise UsageError(f"{what} was given counts= and uneven=True: give one of them, alike on all ranks")
        array = _in_order(source if source.ndim else source.reshape(1))
        ones = (1,) * self._members.size
        about = Call(
            Collective.ALL_GATHER, _INT64, (), counts=ones, root=root, operation=what, part="the lengths, for uneven=True,"
        )

        def trade(deadline: Deadline) -> Action:
            lengths = self._trade_counts(about, np.array([array.shape[0]], _INT64), array, deadline)
            return self._rest(what, lambda: exchange(lengths.tolist()))

        def exchange(lengths: list[int]) -> Action:
            _, call, shape = self._gathering(collective, array, lengths, root)
            if root not in (-1, self._rank):
                return self._nowhere(call, array, is_agreed=True)
            self._check_late(what, out, shape, array.dtype)
            return self._into(call, array, shape, out, give, is_agreed=True)

        return self._in_two_steps(what, trade, [array, out])

    def _in_two_steps(
        self, what: str, trade: Callable[[Deadline], Action], arrays: list[Memory | None], *, may_be_on_device: bool = False
    ) -> Action:
        """Prepare a call whose ranks first tell each other what they are about to do."""
        on_devices = [array for array in arrays if isinstance(array, DeviceArray)]
        if on_devices or may_be_on_device:
            check_arrays(self.devices, *on_devices)  # before the others hear of the call
            return Traded(trade, self.devices, on_devices, partial(self._rest, what))

        def action(deadline: Deadline) -> Any:
            rest = trade(deadline)
            return self._rest(what, lambda: rest(deadline))

        return action

    def _rest(self, what: str, rest: Callable[[], T]) -> T:
        """Do the second part of a call, for which the other ranks wait: whatever goes wrong here, they must learn of it."""
        try:
            return rest()
        except CommError as error:
            if error.operation is None:
                self._job.control.ended(error, what, None)
            raise
        except BaseException as error:
            text = f"rank {self._job.rank} broke off {what} with {type(error).__name__}: {said(error)}"
            self._job.fail(Report("aborted", text, peer=self._job.rank, members=list(self._members.ranks)))
            raise

    def _give_up(self, text: str) -> ManyHandsError:
        """End the job for a mismatch that this rank alone can see; return the error to raise."""
        return self._job.fail(Report("mismatch", text, peer=self._job.rank, members=list(self._members.ranks)))


def _in_order(memory: Memory) -> Memory:
    """Return memory as C-contiguous: itself, or a copy."""
    return memory.library.contiguous(memory) if isinstance(memory, DeviceArray) else contiguous(memory)
