"""Training layers on manyhands: data parallel, sharded, checkpoints; for arrays of NumPy, CuPy, torch and JAX.

>>> import manyhands as mh
>>> import manyhands_parallel as mp
>>> with mh.init() as group:
...     sync = mp.GradientSync(group, like=params)
...     gradients = sync(gradients, weight=len(batch))

All is loaded when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from manyhands import __version__

if TYPE_CHECKING:
    from manyhands_parallel import compress, jax, torch
    from manyhands_parallel.arrays import Memory
    from manyhands_parallel.checkpoint.errors import (
        CheckpointCorruptError,
        CheckpointError,
        CheckpointFormatError,
        CheckpointMissingError,
        CheckpointWriteError,
    )
    from manyhands_parallel.checkpoint.folder import ArrayInfo, CheckpointInfo, Saved, describe, latest
    from manyhands_parallel.checkpoint.load import LoadReport, load
    from manyhands_parallel.checkpoint.save import save
    from manyhands_parallel.checkpoint.saver import AsyncSaver, SaveWork
    from manyhands_parallel.clip import clip_by_global_norm
    from manyhands_parallel.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute, from_local
    from manyhands_parallel.gradients import GradientSync, Step, broadcast, until_all_done
    from manyhands_parallel.normalization import RunningStats, batch_norm, batch_norm_backward
    from manyhands_parallel.optimizers import SGD, Adam, AdamW
    from manyhands_parallel.sampling import Sampler, shard_indices
    from manyhands_parallel.sharded.model import Sharded
    from manyhands_parallel.sharded.optimizer import ShardedOptimizer
    from manyhands_parallel.sharded.ranks import Hybrid
    from manyhands_parallel.sharded_arrays import ShardedArray
    from manyhands_parallel.tensor_parallel import (
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
    from manyhands_parallel.vocab_parallel import vocab_parallel_cross_entropy, vocab_parallel_embedding

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "ArrayInfo",
    "AsyncSaver",
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
    "Memory",
    "Partial",
    "Placement",
    "Replicate",
    "RunningStats",
    "Sampler",
    "SaveWork",
    "Saved",
    "Shard",
    "Sharded",
    "ShardedArray",
    "ShardedOptimizer",
    "Step",
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
    "reduce_from",
    "reduce_scatter_sequence",
    "row_linear",
    "save",
    "scatter_to",
    "shard_indices",
    "shard_of",
    "torch",
    "until_all_done",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]

_HOMES = {
    "Adam": "optimizers",
    "AdamW": "optimizers",
    "ArrayInfo": "checkpoint.folder",
    "AsyncSaver": "checkpoint.saver",
    "CheckpointCorruptError": "checkpoint.errors",
    "CheckpointError": "checkpoint.errors",
    "CheckpointFormatError": "checkpoint.errors",
    "CheckpointInfo": "checkpoint.folder",
    "CheckpointMissingError": "checkpoint.errors",
    "CheckpointWriteError": "checkpoint.errors",
    "GradientSync": "gradients",
    "Hybrid": "sharded.ranks",
    "LoadReport": "checkpoint.load",
    "Memory": "arrays",
    "RunningStats": "normalization",
    "SGD": "optimizers",
    "Sampler": "sampling",
    "SaveWork": "checkpoint.saver",
    "Saved": "checkpoint.folder",
    "Sharded": "sharded.model",
    "ShardedArray": "sharded_arrays",
    "ShardedOptimizer": "sharded.optimizer",
    "Step": "gradients",
    "batch_norm": "normalization",
    "batch_norm_backward": "normalization",
    "broadcast": "gradients",
    "clip_by_global_norm": "clip",
    "describe": "checkpoint.folder",
    "latest": "checkpoint.folder",
    "load": "checkpoint.load",
    "save": "checkpoint.save",
    "shard_indices": "sampling",
    "until_all_done": "gradients",
    "column_linear": "tensor_parallel",
    "copy_to": "tensor_parallel",
    "gather_from": "tensor_parallel",
    "gather_sequence": "tensor_parallel",
    "reduce_from": "tensor_parallel",
    "reduce_scatter_sequence": "tensor_parallel",
    "row_linear": "tensor_parallel",
    "scatter_to": "tensor_parallel",
    "shard_of": "tensor_parallel",
    "vocab_parallel_cross_entropy": "vocab_parallel",
    "vocab_parallel_embedding": "vocab_parallel",
    "DTensor": "dtensor",
    "Partial": "dtensor",
    "Placement": "dtensor",
    "Replicate": "dtensor",
    "Shard": "dtensor",
    "distribute": "dtensor",
    "from_local": "dtensor",
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
