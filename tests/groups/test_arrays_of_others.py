"""Arrays of torch and JAX, in host memory, through the calls of groups: results come back as the type that went in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group
from oneaccord.errors import UsageError

pytestmark = pytest.mark.peers
BACKENDS = pytest.mark.parametrize("backend", ["tcp", "shm"])


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", exc_type=ImportError)


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", exc_type=ImportError)


@BACKENDS
def test_tensors(torch: Any, backend: str) -> None:
    def program(group: Group) -> None:
        x = torch.full((2, 3), group.rank + 1.0)
        for _ in range(2):
            y = group.all_reduce(x)
            assert type(y) is torch.Tensor
            assert y.tolist() == [[3.0] * 3] * 2
        out = torch.zeros(2, 3)
        assert group.all_reduce(x, "mean", out=out) is out
        assert out.tolist() == [[1.5] * 3] * 2
        assert group.all_reduce(x.t(), out=torch.zeros(2, 3).t()).tolist() == [[3.0] * 2] * 3
        half = group.all_reduce(torch.full((4,), 1.5, dtype=torch.bfloat16))
        assert half.dtype == torch.bfloat16
        assert half.tolist() == [3.0] * 4
        weights = torch.nn.Parameter(torch.ones(3))
        for call in (group.all_reduce, group.all_reduce_async, group.all_gather, lambda w: group.send(w, 1 - group.rank)):
            with pytest.raises(UsageError, match="requires a gradient"):
                call(weights * 2)
        with torch.no_grad():
            total = group.all_reduce(weights)
        assert type(total) is torch.Tensor
        assert not total.requires_grad
        assert group.broadcast(x, root=1).tolist() == [[2.0] * 3] * 2
        assert group.all_gather(x[:1]).tolist() == [[1.0] * 3, [2.0] * 3]
        reduced = group.reduce(x, root=1)
        assert (reduced is None) == (group.rank == 0)
        parts = group.scatter(torch.arange(4) if group.rank == 0 else None, root=0)
        assert parts.tolist() == [2 * group.rank, 2 * group.rank + 1]
        swapped = group.all_to_all(torch.arange(3) + group.rank, send_counts=[1, 2])
        assert type(swapped) is torch.Tensor
        assert swapped.tolist() == ([0, 1] if group.rank == 0 else [1, 2, 2, 3])
        assert group.all_reduce_async(x).wait().tolist() == [[3.0] * 3] * 2
        with group.coalesce() as batch:
            works = [batch.all_reduce(torch.ones(n)) for n in (1, 2)]
            into = batch.all_reduce(x, out=out)
        assert [work.wait().tolist() for work in works] == [[2.0], [2.0] * 2]
        assert into.wait() is out
        if group.rank == 0:
            group.send(x, 1)
        else:
            target = torch.zeros(2, 3)
            assert group.recv(0, out=target) is target
            assert target.tolist() == [[1.0] * 3] * 2
        with pytest.raises(oa.LayoutError, match="sparse"):
            group.all_reduce(torch.eye(3).to_sparse())

    must(thread_world(program, 2, backend))


@BACKENDS
def test_arrays_of_jax(jax: Any, backend: str) -> None:
    def program(group: Group) -> None:
        x = jax.numpy.full((2, 2), group.rank + 1.0)
        for _ in range(2):
            y = group.all_reduce(x)
            assert isinstance(y, jax.Array)
            assert y.tolist() == [[3.0] * 2] * 2
        assert x.tolist() == [[group.rank + 1.0] * 2] * 2
        half = group.all_reduce(x.astype(jax.numpy.bfloat16))
        assert half.dtype == jax.numpy.bfloat16
        with pytest.raises(oa.LayoutError, match="cannot be changed"):
            group.all_reduce(x, out=x)
        assert isinstance(group.all_gather(x), jax.Array)
        host = np.zeros((2, 2), np.float32)
        assert group.all_reduce(x, out=host) is host
        assert host.tolist() == [[3.0] * 2] * 2

    must(thread_world(program, 2, backend))
