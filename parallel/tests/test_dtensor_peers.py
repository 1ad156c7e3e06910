"""Distributed arrays of torch and JAX, and those of torch as a second implementation. `make test-peers` runs them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord.errors import DTypeError, LayoutError, UsageError
from oneaccord_parallel import Partial, Replicate, Shard
from oneaccord_simulated import run

pytestmark = pytest.mark.peers


def test_each_rank_has_what_a_dtensor_of_torch_has():
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    shape, kinds = (7, 3), [(Replicate(), TorchReplicate()), (Shard(0), TorchShard(0)), (Shard(1), TorchShard(1))]

    def program(group):
        with oa.DeviceMesh(group, (2, 3)) as mesh:
            for chosen in itertools.product(kinds, repeat=2):
                ours, theirs = zip(*chosen, strict=True)
                d = mp.distribute(np.zeros(shape), mesh, ours)
                its_shape, its_offset = _compute_local_shape_and_global_offset(shape, (2, 3), list(mesh.coordinates), theirs)
                assert d.local.shape == its_shape
                assert d.local.size == 0 or d.offset == its_offset

    run(program, 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_chain_stays_in_its_library_and_keeps_its_values(library, dtype):
    numbers = np.arange(35).reshape(5, 7) - 9
    if library == "torch":
        import torch

        x = torch.tensor(numbers, dtype=getattr(torch, dtype), requires_grad=dtype != "int64")
    else:
        import jax.numpy as jnp

        x = jnp.asarray(numbers).astype(dtype if dtype != "int64" else "int32")

    def program(group):
        with oa.DeviceMesh(group, (2, 2)) as mesh:
            d = mp.distribute(x, mesh, [Shard(0), Shard(0)])
            for target in ([Shard(1), Shard(0, [4, 1])], [Partial(), Shard(1)], [Replicate(), Partial()], [Shard(0)] * 2):
                d = d.redistribute(target)
                assert type(d.local) is type(x)
                assert d.dtype == str(x.dtype).removeprefix("torch.")
            again = mp.from_local(d.local, mesh, [Shard(0)] * 2, x.shape)
            assert again.placements == d.placements
            return np.array(d.full().tolist())

    assert all((found == numbers).all() for found in run(program, 4).results)


class Series:
    """Looks like an array, and is none."""

    dtype, shape = np.dtype("f4"), (2, 2)


ODD = {
    "a graph": (lambda: 2 * torch_ones().requires_grad_(), UsageError, "requires a gradient"),
    "sparse": (lambda: torch_ones().to_sparse(), LayoutError, "torch.sparse_coo: use x.to_dense"),
    "meta": (lambda: torch_ones().to("meta"), LayoutError, "on the device meta"),
    "no array": (Series, DTypeError, "Series"),
}


def torch_ones():
    import torch

    return torch.ones(2, 2)


@pytest.mark.parametrize("some", ["one", "all"])
@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_taken_on_one_rank_is_refused_on_every_rank(kind, some):
    make, error, said = ODD[kind]

    def program(group):
        x = make() if some == "all" or group.rank == 1 else torch_ones()
        for call in (mp.distribute, mp.from_local):
            with pytest.raises(error if some == "all" else UsageError, match=said):
                call(x, group, [Shard(0)])
        return group.all_reduce(1)

    assert run(program, 2).results == [2, 2]


def test_a_conjugated_tensor_is_distributed():
    import torch

    def program(group):
        x = torch.tensor([1j, 2 + 1j]).conj()
        return [call(x, group, [Shard(0)]).full().tolist() for call in (mp.distribute, mp.from_local)]

    assert run(program, 2).results == [[[-1j, 2 - 1j], [-1j, 2 - 1j] * 2]] * 2
