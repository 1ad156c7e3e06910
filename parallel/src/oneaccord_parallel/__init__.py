"""Training layers on oneaccord: data parallel, sharded, checkpoints; for arrays of NumPy, CuPy, torch and JAX.

>>> import oneaccord as oa
>>> import oneaccord_parallel as mp
>>> with oa.init() as group:
...     sync = mp.GradientSync(group, like=params)
...     gradients = sync(gradients, weight=len(batch))

All is loaded when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from oneaccord import __version__

if TYPE_CHECKING:
    from oneaccord_parallel import compress, jax, torch
    from oneaccord_parallel.arrays import Memory
    from oneaccord_parallel.checkpoint.errors import (
        CheckpointCorruptError,
        CheckpointError,
        CheckpointFormatError,
        CheckpointMissingError,
        CheckpointWriteError,
    )
    from oneaccord_parallel.checkpoint.folder import ArrayInfo, CheckpointInfo, Saved, describe, latest
    from oneaccord_parallel.checkpoint.load import LoadReport, load
    from oneaccord_parallel.checkpoint.save import save
    from oneaccord_parallel.checkpoint.saver import AsyncSaver, SaveWork
    from oneaccord_parallel.clip import clip_by_global_norm
    from oneaccord_parallel.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute, from_local
    from oneaccord_parallel.gradients import GradientSync, Step, broadcast, until_all_done
    from oneaccord_parallel.normalization import RunningStats, batch_norm, batch_norm_backward
    from oneaccord_parallel.optimizers import SGD, Adam, AdamW, ByName
    from oneaccord_parallel.pipeline.actions import Action, Message
    from oneaccord_parallel.pipeline.errors import (
        MalformedPlanError,
        MissingActionError,
        PlanDeadlockError,
        PlanError,
        PlanPeakError,
        RepeatedActionError,
    )
    from oneaccord_parallel.pipeline.plan import Plan
    from oneaccord_parallel.pipeline.proof import Proof, prove
    from oneaccord_parallel.pipeline.run import Pipeline
    from oneaccord_parallel.pipeline.schedules import register_schedule, schedule, schedules
    from oneaccord_parallel.pipeline.stages import Stage
    from oneaccord_parallel.pipeline.timeline import Timeline
    from oneaccord_parallel.rpc import Ref, RemoteError, Reply, Service
    from oneaccord_parallel.sampling import Sampler, shard_indices
    from oneaccord_parallel.sharded.model import Sharded
    from oneaccord_parallel.sharded.optimizer import ShardedOptimizer
    from oneaccord_parallel.sharded.ranks import Hybrid
    from oneaccord_parallel.sharded_arrays import PerRank, ShardedArray
    from oneaccord_parallel.tensor_parallel import (
        Vjp,
        column_linear,
        copy_to,
        gather_from,
        gather_sequence,
        reduce_from,
        reduce_scatter_sequence,
        row_linear,
        scatter_to,
        shard_of,
    )
    from oneaccord_parallel.vocab_parallel import vocab_parallel_cross_entropy, vocab_parallel_embedding

__all__ = [
    "SGD",
    "Action",
    "Adam",
    "AdamW",
    "ArrayInfo",
    "AsyncSaver",
    "ByName",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointInfo",
    "CheckpointMissingError",
    "CheckpointWriteError",
    "DTensor",
    "GradientSync",
    "Hybrid",
    "LoadReport",
    "MalformedPlanError",
    "Memory",
    "Message",
    "MissingActionError",
    "Partial",
    "PerRank",
    "Pipeline",
    "Placement",
    "Plan",
    "PlanDeadlockError",
    "PlanError",
    "PlanPeakError",
    "Proof",
    "Ref",
    "RemoteError",
    "RepeatedActionError",
    "Replicate",
    "Reply",
    "RunningStats",
    "Sampler",
    "SaveWork",
    "Saved",
    "Service",
    "Shard",
    "Sharded",
    "ShardedArray",
    "ShardedOptimizer",
    "Stage",
    "Step",
    "Timeline",
    "Vjp",
    "__version__",
    "batch_norm",
    "batch_norm_backward",
    "broadcast",
    "clip_by_global_norm",
    "column_linear",
    "compress",
    "copy_to",
    "describe",
    "distribute",
    "from_local",
    "gather_from",
    "gather_sequence",
    "jax",
    "latest",
    "load",
    "prove",
    "reduce_from",
    "reduce_scatter_sequence",
    "register_schedule",
    "row_linear",
    "save",
    "scatter_to",
    "schedule",
    "schedules",
    "shard_indices",
    "shard_of",
    "torch",
    "until_all_done",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]

_HOMES = {
    "Action": "pipeline.actions",
    "Adam": "optimizers",
    "AdamW": "optimizers",
    "ArrayInfo": "checkpoint.folder",
    "AsyncSaver": "checkpoint.saver",
    "ByName": "optimizers",
    "CheckpointCorruptError": "checkpoint.errors",
    "CheckpointError": "checkpoint.errors",
    "CheckpointFormatError": "checkpoint.errors",
    "CheckpointInfo": "checkpoint.folder",
    "CheckpointMissingError": "checkpoint.errors",
    "CheckpointWriteError": "checkpoint.errors",
    "DTensor": "dtensor",
    "GradientSync": "gradients",
    "Hybrid": "sharded.ranks",
    "LoadReport": "checkpoint.load",
    "MalformedPlanError": "pipeline.errors",
    "Memory": "arrays",
    "Message": "pipeline.actions",
    "MissingActionError": "pipeline.errors",
    "Partial": "dtensor",
    "PerRank": "sharded_arrays",
    "Pipeline": "pipeline.run",
    "Placement": "dtensor",
    "Plan": "pipeline.plan",
    "PlanDeadlockError": "pipeline.errors",
    "PlanError": "pipeline.errors",
    "PlanPeakError": "pipeline.errors",
    "Proof": "pipeline.proof",
    "Ref": "rpc",
    "RemoteError": "rpc",
    "RepeatedActionError": "pipeline.errors",
    "Replicate": "dtensor",
    "Reply": "rpc",
    "RunningStats": "normalization",
    "SGD": "optimizers",
    "Sampler": "sampling",
    "SaveWork": "checkpoint.saver",
    "Saved": "checkpoint.folder",
    "Service": "rpc",
    "Shard": "dtensor",
    "Sharded": "sharded.model",
    "ShardedArray": "sharded_arrays",
    "ShardedOptimizer": "sharded.optimizer",
    "Stage": "pipeline.stages",
    "Step": "gradients",
    "Timeline": "pipeline.timeline",
    "Vjp": "tensor_parallel",
    "batch_norm": "normalization",
    "batch_norm_backward": "normalization",
    "broadcast": "gradients",
    "clip_by_global_norm": "clip",
    "column_linear": "tensor_parallel",
    "copy_to": "tensor_parallel",
    "describe": "checkpoint.folder",
    "distribute": "dtensor",
    "from_local": "dtensor",
    "gather_from": "tensor_parallel",
    "gather_sequence": "tensor_parallel",
    "latest": "checkpoint.folder",
    "load": "checkpoint.load",
    "prove": "pipeline.proof",
    "reduce_from": "tensor_parallel",
    "reduce_scatter_sequence": "tensor_parallel",
    "register_schedule": "pipeline.schedules",
    "row_linear": "tensor_parallel",
    "save": "checkpoint.save",
    "scatter_to": "tensor_parallel",
    "schedule": "pipeline.schedules",
    "schedules": "pipeline.schedules",
    "shard_indices": "sampling",
    "shard_of": "tensor_parallel",
    "until_all_done": "gradients",
    "vocab_parallel_cross_entropy": "vocab_parallel",
    "vocab_parallel_embedding": "vocab_parallel",
}
_MODULES: frozenset[str] = frozenset({"compress", "jax", "torch"})
"""Modules that are named as such: ``mp.torch``."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
