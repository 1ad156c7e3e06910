"""For JAX: gradients, averaged outside and inside of ``jax.jit``, and functions as stages of a pipeline.

>>> params, sync = mp.jax.data_parallel(params, group)
>>> @jax.jit
... def step(params, x, y):
...     gradients = sync(jax.grad(loss_of)(params, x, y), weight=len(x))
...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands.errors import UnsupportedError
from manyhands_parallel.compress import Compression
from manyhands_parallel.gradients.replicas import broadcast
from manyhands_parallel.gradients.sync import GradientSync
from manyhands_parallel.pipeline.jax_stage import Stage
from manyhands_parallel.trees import flatten, rebuild

if TYPE_CHECKING:
    from manyhands import Group

__all__ = ["Stage", "TracedSync", "data_parallel"]

_beside: weakref.WeakKeyDictionary[Group, Group | None] = weakref.WeakKeyDictionary()
"""The group of each group's ranks in which they average."""


def data_parallel(
    params: Any,
    group: Group,
    *,
    bucket_bytes: int = 25 << 20,
    first_bucket_bytes: int = 1 << 20,
    reproducible: bool = True,
    reduce_dtype: str | None = None,
    compress: Compression | None = None,
    timeout_s: float | None = None,
) -> tuple[Any, TracedSync]:
    """Give rank 0's parameters to all ranks, and return what averages their gradients.

    Parameters
    ----------
    params
        A tree of JAX arrays: dicts, lists, tuples, named tuples.
    group
        The ranks that average. They get a group of their own for that, once: JAX runs a compiled function in the background, beside the calls that
        the program makes on ``group`` meanwhile.
    bucket_bytes, first_bucket_bytes, reproducible, reduce_dtype, compress, timeout_s
        As for `GradientSync`.

    Returns
    -------
    params
        The same tree, with rank 0's values in new arrays.
    sync
        ``sync(gradients, weight)`` returns their means.

    Raises
    ------
    UsageError
        The trees or options of the ranks differ; every rank raises it and says what differs.
    """
    params = broadcast(params, group, timeout_s=timeout_s)
    beside = _beside.get(group)
    if beside is None:
        beside = _beside[group] = group.split(0, timeout_s=timeout_s)
    assert beside is not None
    sync = TracedSync(
        beside,
        params,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        reproducible=reproducible,
        reduce_dtype=reduce_dtype,
        compress=compress,
        timeout_s=timeout_s,
    )
    return params, sync


class TracedSync(GradientSync):
    """A `GradientSync` that may also be called in a function that ``jax.jit`` compiles; `data_parallel` makes it.

    There each run of the compiled function is one step, in the order of the program (an ordered ``io_callback``). The result has zeros for
    what no rank uses. An error of the group comes out as JAX's own, whose text holds that of manyhands. Whether steps are paused is asked when
    the compiled function runs, and the result of a paused step is zeros.
    """

    _is_traced = False

    def __call__(self, gradients: Any, weight: float = 1.0) -> Any:
        """Return the weighted mean of a whole tree, as `GradientSync` does; both arguments may be traced.

        Raises
        ------
        UnsupportedError
            The arrays are traced, and on a GPU.
        """
        import jax
        from jax.experimental import io_callback

        leaves, spec = flatten(gradients)
        if not any(isinstance(each, jax.core.Tracer) for each in (*leaves.values(), weight)):
            if self._is_traced:
                jax.effects_barrier()  # steps of compiled functions that still run come first
            return super().__call__(gradients, weight)
        self._is_traced = True
        if any(leaf.place != "numpy" for leaf in self._leaves.values()):
            raise UnsupportedError("inside of jax.jit only gradients on the CPU are averaged; call sync outside of it on a GPU")
        for name, gradient in leaves.items():
            self._check_kind(name, gradient)
        shapes = {name: jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for name, gradient in leaves.items()}
        return rebuild(spec, io_callback(self._run, shapes, leaves, weight, ordered=True))

    def _run(self, leaves: dict[str, Any], weight: Any) -> dict[str, Any]:
        """Take a step in the midst of a compiled function: here nothing of JAX may be called, it would wait for itself."""
        means = self._all_at_once({name: np.asarray(leaf) for name, leaf in leaves.items()}, float(np.asarray(weight)))._means
        return {name: means[name] if name in means else np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
