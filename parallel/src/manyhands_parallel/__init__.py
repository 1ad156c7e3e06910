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
    from manyhands_parallel.clip import clip_by_global_norm
    from manyhands_parallel.gradients import GradientSync, Step, broadcast, until_all_done
    from manyhands_parallel.normalization import RunningStats, batch_norm, batch_norm_backward
    from manyhands_parallel.sampling import Sampler, shard_indices
    from manyhands_parallel.sharded_arrays import ShardedArray

__all__ = [
    "GradientSync",
    "Memory",
    "RunningStats",
    "Sampler",
    "ShardedArray",
    "Step",
    "__version__",
    "batch_norm",
    "batch_norm_backward",
    "broadcast",
    "clip_by_global_norm",
    "compress",
    "jax",
    "shard_indices",
    "torch",
    "until_all_done",
]

_HOMES = {
    "GradientSync": "gradients",
    "Memory": "arrays",
    "RunningStats": "normalization",
    "Sampler": "sampling",
    "ShardedArray": "sharded_arrays",
    "Step": "gradients",
    "batch_norm": "normalization",
    "batch_norm_backward": "normalization",
    "broadcast": "gradients",
    "clip_by_global_norm": "clip",
    "shard_indices": "sampling",
    "until_all_done": "gradients",
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
