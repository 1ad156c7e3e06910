"""Gradients that torch may differentiate no further; this module needs torch.

torch's ``once_differentiable`` refuses a second derivative only if the gradient of the result has a graph. A gradient also depends on the saved arrays of the
forward pass, and that part would be dropped without a word: the gradient of ``(x @ w).sum()`` with respect to x is a function of w.
"""

from __future__ import annotations

from typing import Any

import torch

from oneaccord.errors import UnsupportedError

__all__ = ["differentiated_once"]


def differentiated_once(what: str, gradients: tuple[Any, ...], *, depends: bool) -> tuple[Any, ...]:
    """Return the gradients of a backward pass: in one with ``create_graph=True`` such that a derivative of them raises.

    Parameters
    ----------
    what
        The function that computed them, for the message.
    gradients
        Tensors without a graph, or None.
    depends
        Whether they depend on a tensor that requires a gradient.
    """
    if not (depends and torch.is_grad_enabled()):
        return gradients
    tensors = iter(_Once.apply(what, *(each.detach().requires_grad_() for each in gradients if each is not None)))
    return tuple(None if each is None else next(tensors) for each in gradients)


class _Once(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, what: str, *gradients: Any) -> Any:
        ctx.what = what
        return tuple(each.view_as(each) for each in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            f"{ctx.what} has no second derivative, but create_graph=True needs one: leave it out of everything that is differentiated twice, such as a "
            "penalty on gradients"
        )
