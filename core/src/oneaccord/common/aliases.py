"""The names of MPI, torch.distributed and NCCL for our calls, so that their users learn our names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["ForeignNames", "missing_from_module", "nearest_op"]


def _by_theirs(names: Mapping[str, str]) -> dict[str, str]:
    """Turn our names, each with those that others have for it, around."""
    return {theirs: ours for ours, others in names.items() for theirs in others.split()}


_OF_A_GROUP = _by_theirs(
    {
        "all_gather": "allgather Allgather Allgatherv allGather all_gather_into_tensor",
        "all_gather_async": "Iallgather Iallgatherv",
        "all_gather_object": "allgather_object",
        "all_reduce": "allreduce Allreduce allReduce",
        "all_reduce_async": "Iallreduce",
        "all_to_all": "alltoall Alltoall Alltoallv Alltoallw allToAll all_to_all_single",
        "all_to_all_async": "Ialltoall Ialltoallv",
        "backend_name": "get_backend",
        "barrier": "Barrier",
        "barrier_async": "Ibarrier",
        "broadcast": "bcast Bcast",
        "broadcast_async": "Ibcast",
        "broadcast_object": "broadcast_object_list",
        "close": "Free Disconnect destroy_process_group",
        "coalesce": "all_reduce_coalesced groupStart group_start",
        "exscan": "Exscan",
        "exscan_async": "Iexscan",
        "gather": "Gather Gatherv",
        "gather_async": "Igather Igatherv",
        "rank": "Get_rank get_rank getRank",
        "recv": "Recv",
        "recv_async": "irecv Irecv",
        "reduce": "Reduce",
        "reduce_async": "Ireduce",
        "reduce_scatter": "Reduce_scatter Reduce_scatter_block reduceScatter reducescatter reduce_scatter_tensor",
        "reduce_scatter_async": "Ireduce_scatter Ireduce_scatter_block",
        "scan": "Scan",
        "scan_async": "Iscan",
        "scatter": "Scatter Scatterv",
        "scatter_async": "Iscatter Iscatterv",
        "scatter_object": "scatter_object_list",
        "send": "Send",
        "send_async": "isend Isend",
        "sendrecv": "Sendrecv send_recv sendRecv",
        "shared": "Allocate_shared Shared_query",
        "shrink": "Shrink",
        "split": "Split",
        "split_hosts": "Split_type",
        "subgroup": "new_group Create Create_group",
        "world_size": "size Get_size get_size get_world_size getSize",
    }
)
_OF_THE_PACKAGE = _by_theirs(
    {
        "oa.init, which returns a group": "init_process_group COMM_WORLD MPI Comm",
        "oa.DeviceMesh": "init_device_mesh Create_cart",
        'op="sum"': "SUM ReduceOp",
    }
)
_OPS = _by_theirs(
    {
        "sum": "add plus",
        "mean": "avg average",
        "product": "prod mul multiply",
        "min": "minimum amin",
        "max": "maximum amax",
        "and": "band land all bitwise_and logical_and",
        "or": "bor lor any bitwise_or logical_or",
        "xor": "bxor lxor bitwise_xor logical_xor",
        "minloc": "argmin",
        "maxloc": "argmax",
    }
)


class _Foreign:
    """An attribute that does not exist, whose error names the one that does. Unlike ``__getattr__``, it costs nothing if it is not used."""

    def __init__(self, name: str, ours: str) -> None:
        self._name = name
        self._ours = ours

    def __get__(self, thing: object, owner: type) -> object:
        what = f"type object {owner.__name__!r}" if thing is None else f"{owner.__name__!r} object"
        text = f"{what} has no attribute {self._name!r} (did you mean {self._ours}?)"
        raise AttributeError(text, name=self._name, obj=owner if thing is None else thing)


class ForeignNames:
    """A class whose users learn our names for the calls of a group if they use those of other libraries."""

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in _OF_A_GROUP]


for _theirs, _ours in _OF_A_GROUP.items():
    setattr(ForeignNames, _theirs, _Foreign(_theirs, _ours))


def nearest_op(given: object, known: Iterable[str]) -> str | None:
    """Return the name of the reduction that a name or an object of another library means; None if none is close."""
    import difflib

    # torch's ReduceOp.SUM is that in words; functions have a name.
    name = str(getattr(given, "__name__", given)).rpartition(".")[2].lower()
    return _OPS.get(name) or next(iter(difflib.get_close_matches(name, known, 1)), None)


def missing_from_module(name: str) -> str:
    """Return a sentence: the package does not have a name, and which object has it."""
    meant = _OF_THE_PACKAGE.get(name)
    call = name if name in _OF_A_GROUP.values() else _OF_A_GROUP.get(name)
    if call is not None:
        meant = f"group.{call}, of the group that oa.init() returns"
    return f"module 'oneaccord' has no attribute {name!r}" + (f" (did you mean {meant}?)" if meant else "")
