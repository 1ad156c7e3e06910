"""From the arguments of a call to the program of its steps: all that can be wrong with a call alone is found here, before any byte moves.

A call of one step is that step; another one is a program. It runs to its first step at once, in the thread that makes the call; so errors that it finds until then are raised at once. See `CallSteps`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oneaccord.arrays.buffers import Memory, Taken, Taking
from oneaccord.arrays.dtypes import CODES, REDUCTIONS, OpLike, Reduction, check_dtype, identity_of, resolve_op
from oneaccord.arrays.libraries import DeviceArray, device_library, device_number
from oneaccord.arrays.memory import NOTHING, Array, check_out, contiguous
from oneaccord.calls.arguments import Arguments
from oneaccord.calls.devices.actions import check_device_out
from oneaccord.calls.paths import Paths
from oneaccord.calls.request import CallSteps, Local, Message, Operation, Request, SizeExchange
from oneaccord.config import Settings
from oneaccord.contract.header import DESCRIPTION_BYTES, pack_description, parse_description
from oneaccord.errors import LayoutError, SizeMismatchError, UnsupportedError, UsageError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job
from oneaccord.schedule.steps import Collective

__all__ = ["CallBuilder"]

_HOST = frozenset({"cpu"})
_INT64 = np.dtype(np.int64)
_DESCRIBED = (1 + DESCRIPTION_BYTES // 8,)
_MAX_DESCRIBED = 256


class CallBuilder:
    """The programs of the calls of one group. Each method has the name and the errors of that of `Group`.

    Parameters
    ----------
    job, members
        The job and the members of the group.
    paths
        The object that carries the steps out.
    settings
        The config.

    Attributes
    ----------
    arguments
        Checks ranks and counts.
    take, take_tagged
        Take the arrays of collectives, and of messages with tags.
    makers
        By the name of a call, a function that makes its operation from the array, ``out`` and the other arguments of its key.
    """

    def __init__(self, job: Job, members: Members, paths: Paths, settings: Settings) -> None:
        self.arguments: Arguments = Arguments(members)
        self._job = job
        self._members = members
        self._rank = members.rank
        self._paths = paths
        memory = _HOST if job.backend is None else job.backend.memory
        messages = memory if job.backend is None else job.backend.message_memory
        # A world of one copies.
        alone = members.size == 1 and job.backend is None
        self.take: Taking = Taking(serves_devices=alone or "cuda" in memory, fallback=settings.gpu_fallback)
        routed = " here (backends.hybrid.routes.p2p; without it, arrays on GPUs go with their collectives)"
        self._take_message = Taking(
            serves_devices=alone or "cuda" in messages,
            fallback=settings.gpu_fallback,
            why=routed if "cuda" in memory - messages else "",
        )
        self.take_tagged: Taking = Taking(
            serves_devices=False, fallback=settings.gpu_fallback, why=", and messages with tags move no other on any backend"
        )
        self._reproducible = settings.reproducible
        self._described: dict[tuple[np.dtype[Any], tuple[int, ...]], Array] = {}
        self.makers: dict[str, Callable[..., Operation | CallSteps]] = {
            "all_gather": self.all_gather,
            "all_reduce": self.all_reduce,
            "all_to_all": self.all_to_all,
            "barrier": self.barrier,
            "broadcast": self.broadcast,
            "exscan": self.exscan,
            "gather": self.gather,
            "recv": self.recv,
            "reduce": self.reduce,
            "reduce_scatter": self.reduce_scatter,
            "scan": self.scan,
            "scatter": self.scatter,
            "scatter_part": self.scatter_part,
            "scatter_shape": self.scatter_shape,
            "send": self.send,
            "sendrecv": self.sendrecv,
        }

    # Collectives of one step

    def all_reduce(self, array: npt.ArrayLike, out: Array | None, op: OpLike, reproducible: bool | None) -> Operation:
        if out is None and type(array) is np.ndarray and array.dtype in CODES:  # as `Taking`, which most calls need not ask
            return self.all_reduce_of((array, None, None), op, reproducible)
        return self.all_reduce_of(self.take("all_reduce", array, out, may_stage_later=True), op, reproducible)

    def all_reduce_of(self, taken: Taken, op: OpLike, reproducible: bool | None) -> Operation:
        """Return the step of an all_reduce of an array that was taken before."""
        source, target, give = taken
        reduction, fixed = self._reduction(op, source), self.is_fixed(reproducible)
        request = Request(Collective.ALL_REDUCE, source.dtype, source.shape, reduction=reduction, reproducible=fixed)
        return Operation(request, source, source.shape, target, give)

    def reduce(self, array: npt.ArrayLike, out: Array | None, op: OpLike, reproducible: bool | None, root: int) -> Operation:
        root = self.arguments.rank(root, "root")
        source, target, give = self.take("reduce", array, out, may_stage_later=True)
        request = Request(
            Collective.REDUCE,
            source.dtype,
            source.shape,
            reduction=self._reduction(op, source),
            root=root,
            reproducible=self.is_fixed(reproducible),
        )
        if self._rank == root:
            return Operation(request, source, source.shape, target, give)
        return Operation(request, source, None)

    def broadcast(self, array: npt.ArrayLike | None, out: Array | None, root: int) -> Operation:
        root = self.arguments.rank(root, "root")
        if array is None:
            remedy = (
                "give the array to send"
                if self._rank == root
                else f"give every rank an array of the shape and dtype that rank {root} sends, such as np.empty(shape, dtype), or use "
                "broadcast_object"
            )
            raise LayoutError(f"broadcast got None instead of an array: {remedy}", rank=self._job.rank)
        source, target, give = self.take("broadcast", array, out, may_stage_later=True)
        request = Request(Collective.BROADCAST, source.dtype, source.shape, root=root)
        sent = source if self._rank == root or isinstance(source, DeviceArray) else np.empty(0, source.dtype)
        return Operation(request, sent, source.shape, target, give)

    def all_gather(
        self, array: npt.ArrayLike, out: Array | None, counts: Sequence[int] | None = None, uneven: bool = False
    ) -> CallSteps:
        return (yield from self._gathered(Collective.ALL_GATHER, array, out, -1, counts, uneven))

    def gather(
        self, array: npt.ArrayLike, out: Array | None, root: int, counts: Sequence[int] | None = None, uneven: bool = False
    ) -> CallSteps:
        return (yield from self._gathered(Collective.GATHER, array, out, self.arguments.rank(root, "root"), counts, uneven))

    def reduce_scatter(
        self,
        array: npt.ArrayLike,
        out: Array | None,
        op: OpLike,
        reproducible: bool | None,
        counts: Sequence[int] | None = None,
    ) -> Operation:
        source, target, give = self.take("reduce_scatter", array, out, may_stage_later=True)
        per_rank, sizes = self.arguments.blocks(source, counts, "reduce_scatter")
        request = Request(
            Collective.REDUCE_SCATTER,
            source.dtype,
            source.shape,
            counts=sizes,
            reduction=self._reduction(op, source),
            uneven=None if counts is None else per_rank,
            reproducible=self.is_fixed(reproducible),
        )
        return Operation(request, source, (per_rank[self._rank], *source.shape[1:]), target, give)

    def scan(self, array: npt.ArrayLike, out: Array | None, op: OpLike, reproducible: bool | None) -> Operation:
        return self._prefix(Collective.SCAN, array, out, op, reproducible)

    def exscan(self, array: npt.ArrayLike, out: Array | None, op: OpLike, reproducible: bool | None) -> Operation:
        step = self._prefix(Collective.EXSCAN, array, out, op, reproducible)
        identity = identity_of(op, step.request.dtype)  # on all ranks, to refuse alike
        if self._rank == 0:  # its result comes from no rank
            step.identity = identity
        return step

    def barrier(self, array: Array, out: Array | None) -> Operation:
        return Operation(Request(Collective.BARRIER, NOTHING.dtype, NOTHING.shape), NOTHING, None)

    # Collectives whose ranks first exchange numbers

    def scatter(
        self, array: npt.ArrayLike | None, out: Array | None, root: int, counts: Sequence[int] | None = None
    ) -> CallSteps:
        # The root's dtype and shape travel first.
        root = self.arguments.rank(root, "root")
        source: Memory = NOTHING
        description = np.zeros(_DESCRIBED[0], _INT64)
        if self._rank == root:
            if array is None:
                raise LayoutError("scatter needs an array on the root, not None: give the array whose rows the ranks share")
            source, target, give = self.take("scatter", array, out)
            description = self._describe(source, counts)
            source = _in_order(source)
        else:
            target, give = self.take.receiving("scatter", out)
        uneven = None if counts is None else self.arguments.counts(counts)
        description = yield SizeExchange(
            Request(Collective.BROADCAST, _INT64, _DESCRIBED, root=root, uneven=uneven, operation="scatter", part="shape"),
            description,
            description.size,
            f"root={root}" + ("" if uneven is None else f" and counts={list(uneven)}"),
            by_store=not self._paths.host.moves,
            arrays=_on_devices(source, target),
            may_be_on_device=self._paths.devices.channel is not None,
        )
        return (yield self._part((source, target, give), root, uneven, description))

    def scatter_shape(self, array: Array, out: None, root: int) -> Operation:
        """Return the first step of `scatter` alone: the root's ``array`` is the result of `described`."""
        request = Request(Collective.BROADCAST, _INT64, _DESCRIBED, root=root, operation="scatter", part="shape")
        return Operation(request, array if self._rank == root else np.empty(0, _INT64), _DESCRIBED)

    def scatter_part(self, array: Array, out: Array | None, root: int, description: bytes) -> Operation:
        """Return the second step of `scatter` alone, after one that brought ``description``."""
        taken = self.take("scatter", array, out) if self._rank == root else (NOTHING, *self.take.receiving("scatter", out))
        step = self._part(taken, root, None, np.frombuffer(description, _INT64))
        step.is_repeatable = True  # with the same description
        return step

    def described(self, array: Array) -> Array | None:
        """Return the root's description of an array that scatter divides evenly; None if it is the same as the last one."""
        place = array.dtype, array.shape
        known = self._described.get(place)
        if known is None:
            source, _, _ = self.take("scatter", array, None)
            if source is not array:
                return None
            known = self._describe(source, None)
            if len(self._described) >= _MAX_DESCRIBED:
                self._described.clear()
            self._described[place] = known
        return known

    def _describe(self, source: Memory, counts: Sequence[int] | None) -> Array:
        """Return the kind of memory of the root's array, and then its description; raises if it cannot be divided."""
        self.arguments.check_dimensions(source)
        self.arguments.blocks(source, counts, "scatter")
        kind = device_number(source.library) if isinstance(source, DeviceArray) else 0
        return np.array([kind, *np.frombuffer(pack_description(source.dtype, source.shape), _INT64)], _INT64)

    def _part(self, taken: Taken, root: int, uneven: tuple[int, ...] | None, description: Array) -> Operation:
        """Return the step in which each rank gets its part of the described array."""
        source, target, give = taken
        dtype, shape, _ = parse_description(description[1:].tobytes())
        if dtype is None:
            raise self._paths.host.give_up("the root scatters an array whose dtype needs ml_dtypes: pip install ml_dtypes")
        per_rank = self.arguments.divide(shape[0], uneven)
        part_shape = (per_rank[self._rank], *shape[1:])
        try:
            _check_out(target, part_shape, dtype)
        except UsageError as error:
            raise self._paths.host.give_up(f"rank {self._rank} cannot take its part of scatter: {error}") from error
        row = math.prod(shape[1:])
        request = Request(
            Collective.SCATTER, dtype, shape, counts=tuple(n * row for n in per_rank), root=root, uneven=tuple(per_rank)
        )
        if self._rank != root:
            source = self._part_to_come(int(description[0]), dtype, target)
        return Operation(request, source, part_shape, target, give, is_agreed=True, is_repeatable=False)

    def all_to_all(
        self,
        array: npt.ArrayLike,
        out: Array | None,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
    ) -> CallSteps:
        # If counts are given they travel first, so that every rank knows what it gets.
        source, target, give = self.take("all_to_all", array, out)
        if receive_counts is not None and send_counts is None:
            raise SizeMismatchError("all_to_all got receive_counts without send_counts: give send_counts on all ranks")
        per_rank, sizes = self.arguments.blocks(source, send_counts, "all_to_all")
        if send_counts is None:
            request = Request(Collective.ALL_TO_ALL, source.dtype, source.shape, counts=sizes, receive_counts=sizes)
            return (yield Operation(request, source, source.shape, target, give))
        expected = None if receive_counts is None else self.arguments.counts(receive_counts, "receive_counts")
        source, row = _in_order(source), math.prod(source.shape[1:])
        ones = (1,) * self._members.size
        about = Request(
            Collective.ALL_TO_ALL, _INT64, (), counts=ones, receive_counts=ones, operation="all_to_all", part="counts"
        )
        received = tuple((yield self._telling(about, per_rank, source, target)).tolist())
        if expected is not None and received != expected:
            raise self._paths.host.give_up(
                f"in all_to_all, rank {self._rank} expects receive_counts={list(expected)}, and the others send it {list(received)}"
            )
        shape = (sum(received), *source.shape[1:])
        self._check_late("all_to_all", target, shape, source.dtype)
        # Axis 0 differs from rank to rank, so that only the rest of the shape can be compared.
        request = Request(
            Collective.ALL_TO_ALL,
            source.dtype,
            source.shape[1:],
            counts=sizes,
            receive_counts=tuple(n * row for n in received),
            uneven=(),
        )
        return (yield Operation(request, source, shape, target, give, is_agreed=True, is_repeatable=False))

    # Messages

    def send(self, array: npt.ArrayLike, out: None, dest: int | None) -> CallSteps:
        number = self.arguments.peer_or_nobody(dest, "dest")
        source, _, _ = self._take_message("send", array)
        self.arguments.check_dimensions(source)
        yield Local(None) if number is None else Message(source, number, None, None)

    def recv(self, array: Array, out: Array | None, source: int | None) -> CallSteps:
        number = self.arguments.peer_or_nobody(source, "source")
        target, give = self._take_message.receiving("recv", out)
        if number is not None:
            return (yield self._receiving(Message(None, None, target, number, give)))
        yield self._receiving(Local(None, target))
        return out

    def sendrecv(self, array: npt.ArrayLike, out: Array | None, dest: int | None, source: int | None) -> CallSteps:
        to, whence = self.arguments.partners(dest, source)
        outgoing, target, give = self._take_message("sendrecv", array, out)
        self.arguments.check_dimensions(outgoing)
        if to is not None and to == self._rank:
            return (yield Local(outgoing, target, give))
        if isinstance(outgoing, DeviceArray) and target is None and whence is not None:
            raise LayoutError("sendrecv of an array on a GPU needs out=: it says where the received array goes")
        nobody = to is None and whence is None
        step = Local(None, target) if nobody else Message(outgoing, to, target, whence, give)
        result = yield self._receiving(step)
        return out if whence is None else result

    # The common part

    def is_fixed(self, reproducible: bool | None) -> bool:
        """Return whether a reduction is reproducible, by its argument or the config."""
        return self._reproducible if reproducible is None else bool(reproducible)

    def _reduction(self, op: OpLike, source: Memory) -> Reduction:
        known = REDUCTIONS.get((op, source.dtype)) if type(op) is str else None
        return known or resolve_op(op, source.dtype, source if isinstance(source, np.ndarray) else None)

    def _prefix(
        self, collective: Collective, array: npt.ArrayLike, out: Array | None, op: OpLike, reproducible: bool | None
    ) -> Operation:
        source, target, give = self.take(collective.value, array, out)
        if isinstance(source, DeviceArray):
            raise UnsupportedError(
                f"{collective.value} does not support arrays on GPUs: copy the array to the host, and give the copy"
            )
        reduction, fixed = self._reduction(op, source), self.is_fixed(reproducible)
        if reduction.is_mean:
            raise UsageError(f'{collective.value} does not support op="mean": use op="sum", and divide by the number of ranks')
        request = Request(collective, source.dtype, source.shape, reduction=reduction, reproducible=fixed)
        return Operation(request, source, source.shape, target, give)

    def _gathered(
        self,
        collective: Collective,
        array: npt.ArrayLike,
        out: Array | None,
        root: int,
        counts: Sequence[int] | None,
        uneven: bool,
    ) -> CallSteps:
        """Gather, with counts if the arrays differ in length; with ``uneven`` the counts travel first, and then it is a gather with counts."""
        what = collective.value
        # The counts, and the result of a gather, are on the host by then.
        may_stage_later = collective is Collective.ALL_GATHER and not uneven
        source, target, give = self.take(what, array, out, may_stage_later=may_stage_later)
        if source.ndim == 0:
            source = source.reshape(1)
        if uneven:
            if counts is not None:
                raise UsageError(f"{what} got both counts= and uneven=True: give one of them, the same on all ranks")
            source, ones = _in_order(source), (1,) * self._members.size
            part = "the lengths, for uneven=True,"
            about = Request(Collective.ALL_GATHER, _INT64, (), counts=ones, root=root, operation=what, part=part)
            counts = (yield self._telling(about, (source.shape[0],), source, target)).tolist()
        per_rank, rest = self.arguments.own_rows(source, counts), source.shape[1:]
        row, shape = math.prod(rest), (sum(per_rank), *rest)
        request = Request(
            collective,
            source.dtype,
            source.shape if counts is None else rest,
            counts=tuple(n * row for n in per_rank),
            root=root,
            uneven=None if counts is None else per_rank,
        )
        if root not in (-1, self._rank):
            return (yield Operation(request, source, None, is_agreed=uneven, is_repeatable=not uneven))
        if uneven:
            self._check_late(what, target, shape, source.dtype)
        return (yield Operation(request, source, shape, target, give, is_agreed=uneven, is_repeatable=not uneven))

    def _telling(self, about: Request, mine: Sequence[int], source: Memory, out: Memory | None) -> SizeExchange:
        """Return the message about the number of rows of ``source``: to each rank its number, or the same number to all."""
        root = f" for root={about.root}" if about.root >= 0 else ""
        return SizeExchange(
            about,
            np.array(mine, _INT64),
            self._members.size,
            f"{source.dtype} rows of shape {list(source.shape[1:])}{root}",
            by_store=isinstance(source, DeviceArray),
            arrays=_on_devices(source, out),
        )

    def _part_to_come(self, number: int, dtype: np.dtype[Any], target: Memory | None) -> Memory:
        """Return the empty input of a rank that is not the root of a scatter, in the kind of memory with the root's ``number``."""
        channel = self._paths.devices.channel
        if not number:
            if isinstance(target, DeviceArray):
                raise self._paths.host.give_up(
                    f"rank {self._rank} cannot take its part of scatter: out= is on a GPU, and the root's array is not"
                )
            return np.empty(0, dtype)
        if channel is None or (target is not None and not isinstance(target, DeviceArray)):
            raise self._paths.host.give_up(f"rank {self._rank} cannot take its part of scatter: the root's array is on a GPU")
        library = device_library(number) if target is None else target.library
        return library.empty((0,), dtype, channel.device)

    def _receiving(self, step: Message | Local) -> Message | Local:
        """Check the ``out=`` of a message on the host, which must fit itself."""
        target = step.target if isinstance(step, Message) else step.out
        if target is not None and not isinstance(target, DeviceArray):
            check_out(target, getattr(target, "shape", ()), getattr(target, "dtype", _INT64))
            check_dtype(target.dtype)
        return step

    def _check_late(self, what: str, out: Memory | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Check an ``out=`` that only the numbers of the other ranks describe. The others already rely on this rank: end the job if it does not fit."""
        try:
            _check_out(out, shape, dtype)
        except UsageError as error:
            raise self._paths.host.give_up(f"rank {self._rank} cannot take the result of {what}: {error}") from error


def _on_devices(*memory: Memory | None) -> list[DeviceArray]:
    return [array for array in memory if isinstance(array, DeviceArray)]


def _check_out(out: Memory | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if isinstance(out, DeviceArray):
        check_device_out(out, shape, dtype)
    elif out is not None:
        check_out(out, shape, dtype)


def _in_order(memory: Memory) -> Memory:
    """Return memory as C-contiguous: itself, or a copy."""
    return memory.library.contiguous(memory) if isinstance(memory, DeviceArray) else contiguous(memory)
