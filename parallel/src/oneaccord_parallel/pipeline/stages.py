"""A stage of a pipeline: the functions that carry one microbatch through a part of a model, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oneaccord.errors import UsageError

__all__ = ["Stage"]

Activation = Any
"""An array of NumPy, CuPy, torch or JAX, or a tuple of them."""


class Stage:
    """A part of a model, as two functions, or three.

    >>> def forward(x):
    ...     return x @ weights, x
    >>> def backward(x, dy):
    ...     return dy @ weights.T, {"weights": x.T @ dy}
    >>> stage = mp.Stage(forward, backward)

    For a schedule that divides the backward pass, such as ``zb_h1``, the third makes the gradients of the weights later:

    >>> def backward(x, dy):
    ...     return dy @ weights.T, (x, dy)
    >>> def backward_weight(kept):
    ...     x, dy = kept
    ...     return {"weights": x.T @ dy}
    >>> stage = mp.Stage(forward, backward, backward_weight)

    Such a stage works with every schedule. An activation, and its gradient, is an array or a tuple of arrays, of any shapes and dtypes, which
    may differ from one microbatch to the next; how many arrays it is may not. The arrays that a function returns are on their way for a
    while: do not write to them afterwards.

    Parameters
    ----------
    forward
        ``forward(x)`` returns ``(y, saved)``: the activation for the next stage, and the data that the backward pass needs. The pipeline drops
        ``saved`` when the schedule says so.
    backward
        ``backward(saved, dy)`` returns ``(dx, gradients)``: the gradient with respect to ``x``, of the same structure, with None for an array
        that has none; and a tree of arrays, the same for each microbatch. The first stage may return None for ``dx``.
    backward_weight
        If there is one, ``backward`` returns ``(dx, kept)``, and ``backward_weight(kept)`` returns the gradients.

    Raises
    ------
    UsageError
        One of them cannot be called.
    """

    def __init__(
        self,
        forward: Callable[[Any], tuple[Activation, Any]],
        backward: Callable[[Any, Activation], tuple[Activation, Any]],
        backward_weight: Callable[[Any], Any] | None = None,
    ) -> None:
        functions: dict[str, object] = {"forward": forward, "backward": backward}
        if backward_weight is not None:
            functions["backward_weight"] = backward_weight
        for name, function in functions.items():
            if not callable(function):
                raise UsageError(f"{name} is a function of a stage, and {function!r} cannot be called")
        self.forward = forward
        self.backward = backward
        self.backward_weight = backward_weight

    def _whole_backward(self, saved: Any, dy: Activation) -> tuple[Activation, Any]:
        """Return the gradient for the stage before, and those of the weights, for a schedule that does not divide the backward pass."""
        dx, rest = pair(self.backward(saved, dy), "backward")
        return dx, rest if self.backward_weight is None else self.backward_weight(rest)

    def _evaluate(self, x: Activation) -> Activation:
        """Return the forward pass's output for the next stage, if there will be no backward pass."""
        return pair(self.forward(x), "forward")[0]

    def _loss_of(self, loss: Callable[[Any, Any], Any], output: Activation, target: Any) -> tuple[Any, Activation]:
        """Return the loss of a microbatch, and its gradient with respect to the output of this stage, the last one."""
        value, gradient = pair(loss(output, target), "loss")
        return value, gradient

    def _value_of(self, loss: Callable[[Any, Any], Any], output: Activation, target: Any) -> Any:
        """Return the loss of a microbatch alone, if there will be no backward pass; a gradient may come with it."""
        found = loss(output, target)
        return pair(found, "loss")[0] if isinstance(found, tuple) else found


_EXPECTED = {
    "forward": "(y, saved)",
    "backward": "(dx, gradients)",
    "loss": "(value, gradient with respect to the output)",
}


def pair(result: Any, function: str) -> tuple[Any, Any]:
    """Return the two things that a function of a stage returns.

    Raises
    ------
    UsageError
        It returned a value of another type.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError(f"{function} returned a {type(result).__name__}; expected a tuple {_EXPECTED[function]}")
    return result
