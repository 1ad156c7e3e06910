"""Names that MPI, torch.distributed and NCCL have for what is here: whoever uses one is told ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

import oneaccord as oa

NAMES = {
    "allreduce": "all_reduce",
    "Allreduce": "all_reduce",
    "allReduce": "all_reduce",
    "Iallreduce": "all_reduce_async",
    "bcast": "broadcast",
    "Bcast": "broadcast",
    "Ibcast": "broadcast_async",
    "allgather": "all_gather",
    "Allgatherv": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "Gatherv": "gather",
    "Reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "Alltoallv": "all_to_all",
    "all_to_all_single": "all_to_all",
    "Sendrecv": "sendrecv",
    "isend": "send_async",
    "Irecv": "recv_async",
    "Barrier": "barrier",
    "Ibarrier": "barrier_async",
    "Get_rank": "rank",
    "get_rank": "rank",
    "Get_size": "world_size",
    "size": "world_size",
    "get_world_size": "world_size",
    "new_group": "subgroup",
    "Split": "split",
    "Free": "close",
}


@pytest.fixture
def group() -> Iterator[oa.Group]:
    with oa.init(config={}) as made:
        yield made


def test_a_group_tells_its_own_name_for_what_others_call_otherwise(group):
    for theirs, ours in NAMES.items():
        for thing in (group, oa.Group):
            with pytest.raises(AttributeError) as caught:
                getattr(thing, theirs)
            assert str(caught.value).endswith(f"has no attribute '{theirs}' (did you mean {ours}?)")
            assert (caught.value.name, caught.value.obj) == (theirs, thing)
        assert not hasattr(group, theirs)


def test_what_a_group_tells_of_it_has_and_what_it_has_not_it_does_not_list(group):
    listed = dir(group)
    foreign = [name for name in dir(oa.Group) if name not in listed]
    assert set(NAMES) <= set(foreign)
    for name in foreign:
        with pytest.raises(AttributeError) as caught:
            getattr(group, name)
        assert str(caught.value).partition("did you mean ")[2].removesuffix("?)") in listed


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("all_reduce", "group.all_reduce, of the group that oa.init() returns"),
        ("allreduce", "group.all_reduce, of the group that oa.init() returns"),
        ("get_rank", "group.rank, of the group that oa.init() returns"),
        ("world_size", "group.world_size, of the group that oa.init() returns"),
        ("init_process_group", "oa.init, which returns a group"),
        ("COMM_WORLD", "oa.init, which returns a group"),
        ("init_device_mesh", "oa.DeviceMesh"),
    ],
)
def test_the_package_tells_whose_method_it_is(name, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(oa, name)
    assert str(caught.value) == f"module 'oneaccord' has no attribute '{name}' (did you mean {meant}?)"
    assert (caught.value.name, caught.value.obj) == (name, oa)


def test_asking_for_what_is_not_there_or_for_a_module_imports_no_group():
    code = (
        "import sys, oneaccord as oa\n"
        "assert not hasattr(oa, '__wrapped__') and not hasattr(oa, 'schedule')\n"
        "from oneaccord import common, errors\n"
        "assert 'oneaccord.group.group' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 0
