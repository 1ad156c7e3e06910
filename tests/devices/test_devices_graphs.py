"""What a captured call uses beside the caller's arrays stays until the group is closed, since its graph reads it at each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.device_worlds import NCCL, gpus, ranks
from support.fake_gpu import fake_cupy as cupy
from support.fake_gpu.fake_nccl import FakeNccl

from oneaccord.api import Group

__all__ = ["gpus"]


def _reduced(group: Group, x: Any, out: Any) -> float:
    group.all_reduce(x, out=out)
    return 3.0


def _sent(group: Group, x: Any, out: Any) -> float:
    group.sendrecv(x, 1 - group.rank, 1 - group.rank, out=out)
    return 2.0 - group.rank


def _together(group: Group, x: Any, out: Any) -> float:
    with group.coalesce() as batch:
        batch.all_reduce(x, out=out)
    return 3.0


def _to_root(group: Group, x: Any, out: Any) -> float:
    group.reduce(x, root=0, out=out if group.rank == 0 else None)
    return 3.0 * (group.rank == 0)


def _to_oneself(group: Group, x: Any, out: Any) -> float:
    group.sendrecv(x, group.rank, group.rank, out=out)
    return group.rank + 1.0


@pytest.mark.parametrize("call", [_reduced, _sent, _together, _to_root, _to_oneself])
@pytest.mark.parametrize("strided", ["input", "out", "both"])
def test_a_graph_holds_the_copies_of_strided_arrays(gpus: FakeNccl, call: Callable[..., float], strided: str) -> None:
    def program(group: Group) -> None:
        def array(part: str, value: float) -> Any:
            whole = cupy.full((4, 2), value, np.float32)
            return whole[:, 0] if strided in (part, "both") else cupy.full(4, value, np.float32)

        x, out = array("input", group.rank + 1.0), array("out", 0.0)
        expected = call(group, x, out)
        assert out.get().tolist() == [expected] * 4
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            call(group, x, out)
            graph = stream.end_capture()
            for _ in range(2):
                taken = [cupy.full(4, 77, np.float32) for _ in range(6)]  # as much as the graph works with
                out.fill(0)
                graph.launch(stream)
                assert out.get().tolist() == [expected] * 4
                assert [each.get().tolist() for each in taken] == [[77.0] * 4] * 6
        del graph
        group.synchronize()

    ranks(program, 2, config=NCCL)
