"""Pipelines: how long ranks are idle, and what they hold."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import oneaccord as oa
import oneaccord_parallel as mp
from layers.turns import Action, Row, in_turns, medians

MICROBATCHES = 8
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
PAUSE_S = 0.01
WORKS = {"a pause of 10 ms": (64, 64, PAUSE_S), "a product of matrices": (256, 1024, 0.0)}
"""Rows of a microbatch, width of a stage, and how long a pass lasts at least. A forward pass is one product, a backward pass two of the same
size, one for each half. A pause needs no processor, so that any number of ranks compute at once."""

Pass = tuple[str, float, float]


@dataclass
class Diary:
    """What a rank did in a step: its passes with their begin and end, and the bytes of activations that it held."""

    passes: list[Pass] = field(default_factory=list)
    held: int = 0
    most_held: int = 0

    def timed(self, kind: str, pause_s: float, compute: Callable[[], Any]) -> Any:
        """Return the result of a pass, which lasts for as long as it must."""
        begun = time.perf_counter()
        result = compute()
        if pause_s:
            time.sleep(max(0.0, begun + pause_s - time.perf_counter()))
        self.passes.append((kind, begun, time.perf_counter()))
        return result


class Kept:
    """The input of a stage, kept for the backward pass; its bytes count until nobody refers to it."""

    def __init__(self, x: Any, diary: Diary) -> None:
        self.x = x
        self._diary = diary
        diary.held += x.nbytes
        diary.most_held = max(diary.most_held, diary.held)

    def __del__(self) -> None:
        self._diary.held -= self.x.nbytes


@dataclass
class Layer:
    """The arithmetic of a stage, for both contenders."""

    weights: Any
    pause_s: float
    diary: Diary

    def forward(self, x: Any) -> tuple[Any, Kept]:
        """Return the activation, and what the backward pass needs."""
        return self.diary.timed("forward", self.pause_s, lambda: x @ self.weights), Kept(x, self.diary)

    def backward(self, kept: Kept, dy: Any) -> tuple[Any, tuple[Kept, Any]]:
        """Return the gradient of the input, and what that of the weights needs."""
        return self.diary.timed("backward", self.pause_s, lambda: dy @ self.weights.T), (kept, dy)

    def backward_weight(self, kept: tuple[Kept, Any]) -> dict[str, Any]:
        """Return the gradient of the weights."""
        return {"weights": self.diary.timed("weight", self.pause_s, lambda: kept[0].x.T @ kept[1])}


def pipelines(group: oa.Group, backend: str, rounds: int) -> list[Row]:
    """Measure steps of each schedule on pauses, and on products of matrices where each rank has a processor."""
    import torch

    rows: list[Row] = []
    for work, (batch, width, pause_s) in WORKS.items():
        if not pause_s and group.world_size > (os.cpu_count() or 1):
            continue
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(2, MICROBATCHES * batch, width, generator=generator)
        diaries: dict[tuple[str, str], Diary] = {}
        steps: dict[tuple[str, str], Callable[[], Any]] = {}
        plans = {name: mp.schedule(name, stages=group.world_size, microbatches=MICROBATCHES) for name in SCHEDULES}
        for name, plan in plans.items():
            weights = torch.randn(plan.virtual_stages, width, width, generator=torch.Generator().manual_seed(1)) / width**0.5
            mine = [weights[stage] for stage in plan.stages_of(group.rank)]
            for by, make in ((f"oneaccord, {backend}", ours), ("torch, gloo", theirs)):
                diary = Diary()
                step = make(plan, [Layer(each, pause_s, diary) for each in mine], group, x, y)
                if step is not None:
                    diaries[by, name], steps[by, name] = diary, step
            if ("torch, gloo", name) in steps:
                torch.testing.assert_close(steps[f"oneaccord, {backend}", name](), steps["torch, gloo", name]())
        days: dict[str, list[list[Pass]]] = {}
        actions: dict[str, Action] = {}
        for (by, name), step in steps.items():
            days[f"{by}: {name}"] = []
            actions[f"{by}: {name}"] = partial(noted, step, diaries[by, name], days[f"{by}: {name}"])
        found = medians(in_turns(actions, rounds, group))
        for by, name in steps:
            plan, key = plans[name], f"{by}: {name}"
            idle, (forward, half, weight) = idle_share(group.all_gather_object(days[key][1:]))
            each = x[:batch].nbytes
            rows.append(
                {
                    "work": work,
                    "ranks": group.world_size,
                    "schedule": name,
                    "by": by,
                    "step_ms": found[key] * 1e3,
                    "idle": idle,
                    "formula": float(plan.bubble(forward, half + weight, weight)),
                    "formula_of_equal_passes": str(plan.bubble(1, 2, 1)),
                    "held_bytes": group.all_gather_object(diaries[by, name].most_held),
                    "formula_bytes": [each * count for count in plan.peak()],
                }
            )
    return rows


def noted(step: Action, diary: Diary, days: list[list[Pass]]) -> None:
    """Carry out a step, and put its passes with those of other steps."""
    diary.passes = []
    step()
    days.append(diary.passes)


def idle_share(ranks: Sequence[Sequence[Sequence[Pass]]]) -> tuple[float, list[float]]:
    """Return the idle share of ranks between the first and the last pass of any of them, and how long passes of each kind take; medians.

    All ranks are on one host, whose clock they share.
    """
    shares = []
    for days in zip(*ranks, strict=True):
        passes = [each for day in days for each in day]
        whole = max(end for _, _, end in passes) - min(begin for _, begin, _ in passes)
        shares.append(1 - sum(end - begin for _, begin, end in passes) / (whole * len(ranks)))
    kinds = ("forward", "backward", "weight")
    lasted = [[end - begin for days in ranks for day in days for what, begin, end in day if what == kind] for kind in kinds]
    return statistics.median(shares), [statistics.median(each) for each in lasted]


def ours(plan: mp.Plan, layers: list[Layer], group: oa.Group, x: Any, y: Any) -> Callable[[], Any]:
    """Return a step by oneaccord, which returns the gradients of this rank."""

    def loss(output: Any, target: Any) -> tuple[Any, Any]:
        return (output - target).square().mean(), 2 * (output - target) / output.numel()

    stages = [mp.Stage(layer.forward, layer.backward, layer.backward_weight) for layer in layers]
    pipeline = mp.Pipeline(group, stages, plan)

    def step() -> list[Any]:
        _, gradients = pipeline.step(x, y, loss=loss)
        assert pipeline.most_held == plan.peak()[group.rank]
        return [each["weights"] for each in gradients]

    return step


def theirs(plan: mp.Plan, layers: list[Layer], group: oa.Group, x: Any, y: Any) -> Callable[[], Any] | None:
    """Return a step by torch, which returns the gradients of this rank; None if torch has no such schedule."""
    import torch
    from torch.distributed import pipelining

    class Product(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weights: Any, layer: Layer) -> Any:  # noqa: ARG004 - which has a gradient
            ctx.layer = layer
            result, ctx.kept = layer.forward(x)
            return result

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            dx, kept = ctx.layer.backward(ctx.kept, dy)
            return dx, ctx.layer.backward_weight(kept)["weights"], None

    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, layer: Layer) -> None:
            super().__init__()
            self.layer = layer
            self.weights = torch.nn.Parameter(layer.weights)

        def forward(self, x: Any) -> Any:
            return Product.apply(x, self.weights, self.layer)

    makers = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    }
    if plan.name not in makers:
        return None
    modules = [Module(layer) for layer in layers]
    stages = [
        pipelining.PipelineStage(module, number, plan.virtual_stages, torch.device("cpu"))
        for number, module in zip(plan.stages_of(group.rank), modules, strict=True)
    ]
    given = stages if plan.name == "interleaved_1f1b" else stages[0]
    schedule = makers[plan.name](given, plan.microbatches, loss_fn=lambda output, target: (output - target).square().mean())
    first, last = plan.placement[0] == group.rank, plan.placement[-1] == group.rank

    def step() -> list[Any]:
        for module in modules:
            module.weights.grad = None
        schedule.step(*([x] if first else []), **({"target": y, "losses": []} if last else {}))
        return [module.weights.grad for module in modules]

    return step
