"""A function of JAX as a stage of a pipeline; its gradients are made by ``jax.vjp``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from oneaccord_parallel.pipeline import stages

__all__ = ["Stage"]


class Stage(stages.Stage):
    """A function as a stage. Its gradients are a tree like its parameters.

    The loss of a pipeline whose last stage is one is a function of JAX: ``loss(output, target)`` returns an array without dimensions.

    Parameters
    ----------
    function
        ``function(params, x)`` returns ``y``; ``x`` and ``y`` are arrays or tuples of arrays. It may be jitted.
    params
        A tree of arrays of floats.

    Attributes
    ----------
    params
        The parameters of the function. JAX arrays never change: set new ones after each update.
    """

    def __init__(self, function: Callable[[Any, Any], Any], params: Any) -> None:
        super().__init__(self._run_forward, self._run_backward, self._run_backward_weight)
        self.function = function
        self.params = params

    def _whole_backward(self, saved: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradients of input and parameters."""
        x_is_tuple, kinds, pull = saved
        gradients, dx = pull(_cotangents(dy, kinds))
        return _without_integers(dx, x_is_tuple), gradients

    def _evaluate(self, x: Any) -> Any:
        """Return the output of the function, without the data for a backward pass."""
        return self.function(self.params, x)

    def _loss_of(self, loss: Callable[[Any, Any], Any], output: Any, target: Any) -> tuple[Any, Any]:
        """Return the loss and its gradient, by ``jax.value_and_grad``."""
        import jax

        value, gradient = jax.value_and_grad(loss)(output, target)
        return value, gradient

    def _value_of(self, loss: Callable[[Any, Any], Any], output: Any, target: Any) -> Any:
        """Return the loss, without the data for a gradient."""
        return loss(output, target)

    def _run_forward(self, x: Any) -> tuple[Any, Any]:
        import jax

        y, pull = jax.vjp(self.function, self.params, x)
        return y, (isinstance(x, tuple), [(part.shape, part.dtype) for part in (y if isinstance(y, tuple) else (y,))], pull)

    def _run_backward(self, saved: Any, dy: Any) -> tuple[Any, Any]:
        x_is_tuple, kinds, pull = saved
        dy = _cotangents(dy, kinds)
        return _without_integers(_halves()[1](pull, dy), x_is_tuple), (pull, dy)

    def _run_backward_weight(self, kept: Any) -> Any:
        return _halves()[0](*kept)


@cache
def _halves() -> tuple[Any, Any]:
    """Return functions for the gradients of the parameters and of the input; XLA leaves out of each the work for the other."""
    import jax

    return jax.jit(lambda pull, dy: pull(dy)[0]), jax.jit(lambda pull, dy: pull(dy)[1])


def _cotangents(dy: Any, kinds: list[tuple[tuple[int, ...], Any]]) -> Any:
    """Return gradients with JAX's form of None: zeros, for integers of a dtype of no bytes."""
    import jax

    parts = [
        part
        if part is not None
        else np.zeros(shape, dtype if jax.numpy.issubdtype(dtype, jax.numpy.inexact) else jax.dtypes.float0)
        for part, (shape, dtype) in zip(dy if isinstance(dy, tuple) else (dy,), kinds, strict=True)
    ]
    return tuple(parts) if isinstance(dy, tuple) else parts[0]


def _without_integers(dx: Any, is_tuple: bool) -> Any:
    """Return a gradient with None for integers, which JAX gives a dtype of no bytes."""
    parts = tuple(None if part.dtype.itemsize == 0 else part for part in (dx if is_tuple else (dx,)))
    return parts if is_tuple else parts[0]
