"""Steps of data-parallel training, and the memory that they take."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import numpy as np

import oneaccord as oa
import oneaccord_parallel as mp
from layers.turns import Action, Row, in_turns, medians

MODELS = {"8 layers of 1024": (8, 1024, 64), "96 layers of 96": (96, 96, 64)}
"""Layers, their width, and the samples of a rank's batch."""


def model_of(layers: int, width: int) -> Any:
    """Return a stack of linear layers in torch, with the same weights each time."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*(part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())))


def steps(groups: Mapping[str, oa.Group], group: oa.Group, rounds: int) -> list[Row]:
    """Measure a step of each model: alone, by torch over Gloo, and by oneaccord over each backend."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rows = []
    for name, (layers, width, batch) in MODELS.items():
        x = torch.randn(batch, width, generator=torch.Generator().manual_seed(group.rank))

        def step(model: Any, call: Any, x: Any) -> None:
            model.zero_grad(set_to_none=True)
            call(x).square().mean().backward()

        alone = model_of(layers, width)
        theirs_inside = model_of(layers, width)
        theirs = DistributedDataParallel(theirs_inside, gradient_as_bucket_view=True)
        flat = torch.zeros(sum(p.numel() for p in alone.parameters()))
        actions: dict[str, Action] = {
            "alone": partial(step, alone, alone, x),
            "gloo": partial(step, theirs_inside, theirs, x),
            "gloo, all_reduce": partial(dist.all_reduce, flat),
        }
        models = {}
        for backend, own in groups.items():
            models[backend] = model_of(layers, width)
            mp.torch.data_parallel(models[backend], own)
            actions[backend] = partial(step, models[backend], models[backend], x)
            buffer = torch.from_numpy(own.empty(flat.shape, np.float32))
            buffer.zero_()
            actions[f"{backend}, all_reduce"] = partial(own.all_reduce, buffer, out=buffer, reproducible=True)
        found = medians(in_turns(actions, rounds, group))
        for backend in groups:
            for ours, its in zip(models[backend].parameters(), theirs_inside.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, its.grad)
        for who in ("gloo", *groups):
            whole, apart = found[who], found[f"{who}, all_reduce"]
            rows.append(
                {
                    "model": name,
                    "by": "torch DDP, gloo" if who == "gloo" else f"oneaccord, {who}",
                    "step_ms": whole * 1e3,
                    "alone_ms": found["alone"] * 1e3,
                    "all_reduce_ms": apart * 1e3,
                    "overlap": 1 - (whole - found["alone"]) / apart,
                    "of_gloo": whole / found["gloo"],
                }
            )
    return rows


def memory(group: oa.Group) -> list[Row]:
    """Count what a rank holds at most in a step with Adam, and compare it with the formula."""
    units, rows_of, n = 8, 256, group.world_size
    params = {f"layer{i}": {"w": np.ones((rows_of, rows_of), np.float32)} for i in range(units)}
    unit = rows_of * rows_of
    whole = units * unit
    formulas: dict[Literal["none", "grad", "full"], int] = {
        "none": 16 * whole,
        "grad": 4 * whole + 12 * whole // n + 4 * unit,
        "full": 16 * whole // n + 4 * 2 * unit + 4 * unit,
    }
    found = []
    for strategy, formula in formulas.items():
        store = mp.Sharded(params, group, strategy=strategy, prefetch=1)
        adam = mp.Adam(lr=1e-3)
        for _ in range(3):
            store.memory.reset_peak()
            with store.step(weight=1):
                for name in params:
                    with store.unit(name):
                        pass
                for name in reversed(params):
                    with store.unit(name) as weights:
                        gradients = {key: np.ones_like(value) for key, value in weights.items()}
                    store.reduce(name, gradients)
            store.update(adam)
        found.append({"strategy": strategy, "peak_bytes": store.memory.peak, "formula_bytes": formula})
    return found
