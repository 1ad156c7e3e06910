"""Functions of autograd whose gradient has no gradient of its own, and says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from manyhands.errors import UnsupportedError

__all__ = ["differentiable_once"]


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a second derivative of what ``backward`` returns.

    `torch.autograd.function.once_differentiable` does so only if what came to ``backward`` has a history. A gradient also depends on what the
    forward pass has saved, such as a weight, and that part would be missing without a word.

    Parameters
    ----------
    backward
        The static method of a ``torch.autograd.Function``.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        wanted = torch.is_grad_enabled()  # the backward pass runs with create_graph=True
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        if not wanted:
            return outputs
        alone = not isinstance(outputs, tuple)
        outputs = (outputs,) if alone else outputs
        tensors = [each for each in outputs if each is not None]
        marked = iter(_Refusing.apply(torch.empty(0, requires_grad=True), *tensors) if tensors else ())
        told = tuple(None if each is None else next(marked) for each in outputs)
        return told[0] if alone else told

    return once


class _Refusing(torch.autograd.Function):  # type: ignore[misc]
    """Gives tensors a history that ends here."""

    @staticmethod
    def forward(_ctx: Any, _anchor: Any, *tensors: Any) -> Any:
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(_ctx: Any, *_grads: Any) -> Any:
        raise UnsupportedError(
            "a layer of mp.torch has no second derivative: compute what needs one, such as a penalty on gradients, from layers of torch alone, or "
            "leave create_graph=True away"
        )
