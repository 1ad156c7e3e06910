"""For JAX: gradients, averaged outside and inside of ``jax.jit``, and functions as stages of a pipeline.

>>> params, sync = mp.jax.data_parallel(params, group)
>>> @jax.jit
... def step(params, x, y):
...     gradients = sync(jax.grad(loss_of)(params, x, y), weight=len(x))
...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from oneaccord.errors import UnsupportedError
from oneaccord_parallel.compress import Compression
from oneaccord_parallel.gradients.replicas import broadcast
from oneaccord_parallel.gradients.sync import GradientSync
from oneaccord_parallel.pipeline.jax_stage import Stage
from oneaccord_parallel.trees import flatten, rebuild

if TYPE_CHECKING:
    from oneaccord import Group

__all__ = ["Stage", "TracedSync", "data_parallel"]

_BESIDE = "_oneaccord_parallel_beside"
"""For each group the group in which its ranks average: it lives no longer than the first group, to which it refers."""


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
    """Give rank 0's parameters to all ranks, and return a function that averages their gradients.

    Parameters
    ----------
    params
        A tree of JAX arrays: dicts, lists, tuples, named tuples.
    group
        The ranks that average. They get a separate group for that, once: JAX runs a compiled function in the background, at the same time as the program's own
        calls on ``group``. It is ``sync.group``; if a rank has closed it, they get a new one.
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
        The trees or options of the ranks differ; every rank raises it with the difference.
    """
    params = broadcast(params, group, timeout_s=timeout_s)
    sync = TracedSync(
        _group_beside(group, timeout_s),
        params,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        reproducible=reproducible,
        reduce_dtype=reduce_dtype,
        compress=compress,
        timeout_s=timeout_s,
    )
    return params, sync


def _group_beside(group: Group, timeout_s: float | None) -> Group:
    """Return the group in which the ranks of a group average: the one from before, as long as none of them has closed it."""
    kept: Group | None = vars(group).get(_BESIDE)
    is_gone = group.all_reduce(np.array(int(kept is None or not kept.is_usable)), "max", timeout_s=timeout_s)
    if kept is not None and not is_gone:
        return kept
    if kept is not None:
        kept.close(timeout_s=timeout_s)  # its resources are given back when all ranks have
    new = group.split(0, timeout_s=timeout_s)
    assert new is not None
    vars(group)[_BESIDE] = new
    return new


class TracedSync(GradientSync):
    """A `GradientSync` that may also be called in a function that ``jax.jit`` compiles; `data_parallel` makes it.

    There each run of the compiled function is one step, in the order of the program (an ordered ``io_callback``). The result has zeros for
    what no rank uses. An error of the group comes out as JAX's own, whose text holds that of oneaccord. Whether steps are paused is asked when
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
            raise UnsupportedError(
                "inside jax.jit, only gradients on the CPU can be averaged; on a GPU, call sync outside of it"
            )
        for name, gradient in leaves.items():
            self._check_kind(name, gradient)
        shapes = {name: jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for name, gradient in leaves.items()}
        return rebuild(spec, io_callback(self._run, shapes, leaves, weight, ordered=True))

    def _run(self, leaves: dict[str, Any], weight: Any) -> dict[str, Any]:
        """Take a step in the middle of a compiled function: calls of JAX are not allowed here, because it would wait for itself."""
        means = self._all_at_once({name: np.asarray(leaf) for name, leaf in leaves.items()}, float(np.asarray(weight)))._means
        return {name: means[name] if name in means else np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
