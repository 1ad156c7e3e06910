"""The calls that torch makes on a process group, each made of ours."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from oneaccord import Group, Work
from oneaccord.errors import SizeMismatchError, UnsupportedError, UsageError
from oneaccord_torch.ranks import NAME
from oneaccord_torch.work import Handle, seconds_of

__all__ = ["Calls"]

_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "and",
    ReduceOp.BOR: "or",
    ReduceOp.BXOR: "xor",
    ReduceOp.PREMUL_SUM: "sum",
}
_NUMPY_HAS = frozenset(
    getattr(torch, name)
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
)


class Calls:
    """The methods of a process group of torch's, whose names and parameters are torch's.

    They check their arguments at once, and return a `Handle`. They run in the background, in the order in which they came, unless ``opts`` says
    that the caller will wait anyway. Tensors in the host's memory that are contiguous are read and written where they are.

    Parameters
    ----------
    group
        The ranks.
    timeout
        The most time that a call may last, if it names none itself.

    Attributes
    ----------
    kept
        What must live as long as the process group.
    """

    def __init__(self, group: Group, timeout: timedelta) -> None:
        self.group: Group = group
        self._timeout_s = timeout.total_seconds()
        self._batch: list[Handle] | None = None
        self.kept: object = None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return NAME

    def shutdown(self) -> None:
        """Close the group; see `oneaccord.Group.close`."""
        self.group.close()

    def abort(self) -> None:
        """Give up: every other rank that waits learns so."""
        self.group.__exit__(UsageError, UsageError("the program called abort() of its process group"), None)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the most time that a call may last, if it names none itself."""
        self._timeout_s = timeout.total_seconds()

    # Collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> Handle:
        """Combine tensors of all ranks in place."""
        (tensor,) = tensors = _listed(tensors)
        _need_no_graph(tensors, "all_reduce")
        if tensor.is_sparse:
            return self._sum_sparse(tensor, opts)
        array = _memory(tensor)
        _scale(tensor, opts)
        return self._call("all_reduce", opts, tensors, array, _op(opts), out=array)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Handle:
        """Combine several tensors of all ranks in place, as one message for each dtype."""
        op = _op(opts)
        _need_no_graph(tensors, "all_reduce")
        for tensor in tensors:
            _scale(tensor, opts)
        with self.group.coalesce(wait=False, timeout_s=self._seconds(opts)) as batch:
            works = [batch.all_reduce(array, op, out=array) for array in map(_memory, tensors)]
        return self._handle(works, tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Handle:
        """Give the root's tensor to every rank."""
        (tensor,) = tensors = _listed(tensors)
        _need_no_graph(tensors, "broadcast")
        array = _memory(tensor)
        return self._call("broadcast", opts, tensors, array, getattr(opts, "rootRank", 0), out=array)

    def reduce(self, tensors: Any, opts: Any = None) -> Handle:
        """Combine tensors of all ranks; the root's gets the result."""
        (tensor,) = tensors = _listed(tensors)
        _need_no_graph(tensors, "reduce")
        if _factor(opts) is not None and self.group.rank != opts.rootRank:
            tensor = tensor.clone()
        _scale(tensor, opts)
        array = _memory(tensor)
        return self._call("reduce", opts, tensors, array, _op(opts), getattr(opts, "rootRank", 0), out=array)

    def allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None) -> Handle:
        """Give every rank the tensors of all ranks, one by one."""
        return self._gather("all_gather", outputs[0], inputs[0], opts)

    def allgather_coalesced(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None) -> Handle:
        """Give every rank several tensors of all ranks: a list of them from each rank."""
        lists = zip(zip(*outputs, strict=True), inputs, strict=True)
        return self._together([self._gather("all_gather", parts, tensor, opts) for parts, tensor in lists])

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Handle:
        """Give every rank the tensors of all ranks, one behind the other."""
        _check_size(
            "all_gather", "output", output, self.group.world_size * tensor.numel(), "the world size times that of the input"
        )
        _say_that_gradients_stop([tensor], "all_gather")
        target, then = _flat_target(output)
        return self._call("all_gather", opts, [output], _flat(tensor), out=target, then=then)

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Handle:
        """Do the same with several tensors."""
        return self._together([self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def gather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None) -> Handle:
        """Give the root the tensors of all ranks, one by one."""
        return self._gather("gather", outputs[0] if outputs else None, inputs[0], opts, getattr(opts, "rootRank", 0))

    def scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any = None) -> Handle:
        """Give each rank one of the root's tensors."""
        _say_that_gradients_stop([each for one in inputs for each in one], "scatter")
        array = torch.stack(list(inputs[0])).data if inputs and len(inputs[0]) else None
        if self.group.rank != opts.rootRank:
            array = None
        elif array is None or array.shape[0] != self.group.world_size:
            raise SizeMismatchError(f"scatter needs {self.group.world_size} tensors on the root, one for each rank")
        return self._call(
            "scatter", opts, outputs, None if array is None else _memory(array), opts.rootRank, out=_memory(outputs[0])[None]
        )

    def reduce_scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any = None) -> Handle:
        """Combine lists of tensors of all ranks; each rank gets its one."""
        output, parts = outputs[0], list(inputs[0])
        sizes = [part.numel() for part in parts]
        _say_that_gradients_stop(parts, "reduce_scatter")
        whole = torch.cat([part.reshape(-1) for part in parts])
        return self._reduce_scatter(output, whole, opts, None if len(set(sizes)) == 1 else sizes)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Handle:
        """Combine tensors of all ranks; each rank gets its part."""
        _check_size(
            "reduce_scatter", "input", tensor, self.group.world_size * output.numel(), "the world size times that of the output"
        )
        _say_that_gradients_stop([tensor], "reduce_scatter")
        return self._reduce_scatter(output, tensor, opts, None)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Handle:
        """Do the same with several tensors."""
        return self._together([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Handle:
        """Give each rank its rows of this rank's tensor."""
        _say_that_gradients_stop([tensor], "all_to_all")
        size = self.group.world_size
        counts: dict[str, Any] = {}
        if output_splits or input_splits:
            counts["send_counts"] = list(input_splits or ()) or [tensor.shape[0] // size] * size
            counts["receive_counts"] = list(output_splits or ()) or [output.shape[0] // size] * size
        return self._call("all_to_all", opts, [output], _memory(tensor), out=_memory(output), **counts)

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Handle:
        """Give each rank one of this rank's tensors."""
        _say_that_gradients_stop(inputs, "all_to_all")
        return self._call(
            "all_to_all",
            opts,
            outputs,
            _memory(torch.cat([part.reshape(-1) for part in inputs])),
            send_counts=[part.numel() for part in inputs],
            receive_counts=[part.numel() for part in outputs],
            then=lambda joined: _divide(joined, outputs),
        )

    def barrier(self, opts: Any = None) -> Handle:
        """Wait until every rank has come here."""
        return self._call("barrier", opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has come here; the error names all ranks that have not, with ``wait_all_ranks`` or without."""
        self.group.barrier(timeout_s=seconds_of(timeout) or self._timeout_s)

    # Messages

    def send(self, tensors: Any, dest: int, tag: int = 0) -> Handle:
        """Send a tensor to one rank."""
        (tensor,) = tensors = _listed(tensors)
        return self._call("send", None, tensors, _tagged(_flat(tensor), tag), dest)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Handle:
        """Receive a tensor from one rank. Messages of two ranks come in the order in which they were sent, whatever their tags."""
        (tensor,) = tensors = _listed(tensors)
        _need_no_graph(tensors, "recv")
        target, then = _flat_target(tensor)
        return self._call("recv", None, tensors, source, out=_tagged(target, tag), then=then, source=source)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Handle:
        """Refuse to receive from any source."""
        raise UnsupportedError("recv() was called without a source, and oneaccord receives from a named rank only: give src=")

    # Calls that go together: torch calls them one by one between these two

    def start_coalescing(self, device: Any = None) -> None:
        """Begin to keep the handles of calls."""
        self._batch = []

    def end_coalescing(self, device: Any = None) -> Handle:
        """Return one handle for all calls since."""
        batch, self._batch = self._batch or [], None
        return self._together(batch)

    # What becomes of a call

    def _call(
        self,
        name: str,
        opts: Any,
        result: Sequence[Any],
        *arguments: Any,
        then: Callable[[Any], object] | None = None,
        source: int = -1,
        **named: Any,
    ) -> Handle:
        """Make a call of ours, and return its handle; it has ended already where the caller waits anyway."""
        seconds = self._seconds(opts)
        if opts is not None and not opts.asyncOp:
            value = getattr(self.group, name)(*arguments, **named, timeout_s=seconds)
            if then is not None:
                then(value)
            return self._handle([], result)
        work = getattr(self.group, f"{name}_async")(*arguments, **named, timeout_s=seconds)
        return self._handle([work], result, None if then is None else lambda results: then(results[0]), source)

    def _handle(
        self,
        works: Sequence[Work[Any]],
        result: Sequence[Any],
        then: Callable[[list[Any]], object] | None = None,
        source: int = -1,
    ) -> Handle:
        handle = Handle(works, list(result), then, source)
        if self._batch is not None:
            self._batch.append(handle)
        return handle

    def _together(self, handles: Sequence[Handle]) -> Handle:
        """Return one handle for several calls."""
        return handles[0] if len(handles) == 1 else Handle.of(handles)

    def _seconds(self, opts: Any) -> float:
        return (seconds_of(opts.timeout) if opts is not None else None) or self._timeout_s

    def _gather(self, name: str, parts: Sequence[Any] | None, tensor: Any, opts: Any, *root: int) -> Handle:
        _say_that_gradients_stop([tensor], name)
        sizes = None if parts is None else [part.numel() for part in parts]
        if sizes is None or set(sizes) == {tensor.numel()}:
            array, counts = _memory(tensor)[None], None
        else:
            array, counts = _flat(tensor), sizes
        then = None if parts is None else lambda joined: None if joined is None else _divide(joined, parts)
        return self._call(name, opts, [list(parts or ())], array, *root, counts=counts, then=then)

    def _sum_sparse(self, tensor: Any, opts: Any) -> Handle:
        """Combine sparse tensors of all ranks, whose numbers of elements may differ: each rank gets all, and adds up those of one place."""
        if _op(opts) != "sum":
            raise UnsupportedError(
                f"all_reduce of a sparse tensor supports only ReduceOp.SUM, and {opts.reduceOp} was given: use x.to_dense()"
            )
        mine = tensor.coalesce()

        def place(joined: list[Any]) -> None:
            places, values = (_tensor(each) for each in joined)
            tensor.copy_(torch.sparse_coo_tensor(places.t(), values, tensor.shape, check_invariants=True).coalesce())

        parts = (mine.indices().t(), mine.values())
        works = [self.group.all_gather_async(_memory(part), uneven=True, timeout_s=self._seconds(opts)) for part in parts]
        return self._handle(works, [tensor], place)

    def _reduce_scatter(self, output: Any, whole: Any, opts: Any, counts: list[int] | None) -> Handle:
        factor = _factor(opts)
        array = _flat(whole if factor is None else whole * factor)
        target, then = _flat_target(output)
        return self._call("reduce_scatter", opts, [output], array, _op(opts), counts=counts, out=target, then=then)


# What autograd does not see

_REMEDY = "give x.detach(), call it under torch.no_grad(), or take the function of torch.distributed.nn.functional, which has a gradient"


def _need_no_graph(tensors: Sequence[Any], name: str) -> None:
    """Refuse to write to a tensor that has been computed from others: its gradient would be that of the value before. Parameters are taken."""
    if torch._C._current_graph_task_id() != -1:  # DistributedDataParallel, in a backward pass with create_graph=True
        return
    if any(tensor.requires_grad and not tensor.is_leaf for tensor in tensors) and torch.is_grad_enabled():
        raise UsageError(f"{name} writes to a tensor that requires grad, and autograd does not see that: {_REMEDY}")


def _say_that_gradients_stop(tensors: Sequence[Any], name: str) -> None:
    """Warn if gradients end here; programs do this on purpose, and put their own part back into the result."""
    if any(tensor.requires_grad for tensor in tensors) and torch.is_grad_enabled():
        warnings.warn(
            f"{name} was given a tensor that requires grad, and the result has no gradient: {_REMEDY}",
            UserWarning,
            stacklevel=_level(),
        )


def _level() -> int:
    """Return the level of the line outside of torch and oneaccord that makes the call."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "oneaccord_torch"):
        frame, level = frame.f_back, level + 1
    return level


# From tensors to arrays


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _memory(tensor: Any) -> Any:
    """Return the memory of a tensor, for a call of ours; autograd sees nothing of that, as with torch's own backends.

    What NumPy cannot hold is handed on as it is: the group knows what to do with it, or says why not.
    """
    tensor = tensor.data
    plain = tensor.is_cpu and tensor.dtype in _NUMPY_HAS and tensor.layout is torch.strided
    return tensor.numpy() if plain and not (tensor.is_conj() or tensor.is_neg()) else tensor


def _tensor(array: Any) -> Any:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)


def _flat(tensor: Any) -> Any:
    return _memory(tensor.data.reshape(-1))


def _flat_target(tensor: Any) -> tuple[Any, Callable[[Any], object] | None]:
    """Return the memory of a tensor as one row, or memory beside it and what copies from there."""
    if tensor.is_contiguous():
        return _memory(tensor.data.view(-1)), None
    beside = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return _memory(beside), lambda _: tensor.data.copy_(beside.view(tensor.shape))


def _divide(joined: Any, parts: Sequence[Any]) -> None:
    """Copy what all ranks have sent to where each one's part belongs."""
    flat = _tensor(joined).reshape(-1)
    for part, piece in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.data.copy_(piece.view(part.shape))


def _tagged(array: Any, tag: int) -> Any:
    """Return memory of a dtype that also bears a tag, so that a message with another one is refused as one of another dtype is."""
    if not tag:
        return array
    if not isinstance(array, np.ndarray):
        raise UnsupportedError(f"a message of {array.dtype} cannot have a tag other than 0, and {tag} was given")
    return array.view([(f"tag {tag}", array.dtype)])


def _check_size(what: str, name: str, tensor: Any, expected: int, words: str) -> None:
    if tensor.numel() != expected:
        raise SizeMismatchError(f"the {name} of {what} has {tensor.numel()} elements, but {expected} are expected: {words}")


# Reductions


def _op(opts: Any) -> str:
    if opts is None:
        return "sum"
    op = _OPS.get(getattr(opts.reduceOp, "op", opts.reduceOp))
    if op is None:
        raise UsageError(f"oneaccord has no reduction {opts.reduceOp}: use one of {', '.join(map(str, _OPS))}")
    return op


def _factor(opts: Any) -> Any:
    """Return what PREMUL_SUM multiplies by; None for any other reduction."""
    if opts is None or getattr(opts.reduceOp, "op", None) != ReduceOp.PREMUL_SUM:
        return None
    return opts.reduceOp.__getstate__()[1]


def _scale(tensor: Any, opts: Any) -> None:
    factor = _factor(opts)
    if factor is not None:
        tensor.data.mul_(factor)
