"""The tensor parallel layers for torch's autograd: they return the result alone, and its backward pass calls their ``vjp``.

>>> from oneaccord_parallel import torch_tensor_parallel as tp
>>> hidden = torch.relu(tp.column_linear(x, w1.T, b1, group))
>>> loss = tp.row_linear(hidden, w2.T, b2, group).square().mean()
>>> loss.backward()

Every rank runs the same backward pass: a layer's collectives run together with its gradients. It runs under the autocast of the forward pass.
Its saved tensors are kept in torch's way: freed after it, or computed again by ``torch.utils.checkpoint``, collectives included. A second derivative
is refused with an `UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from oneaccord_parallel import tensor_parallel, vocab_parallel

if TYPE_CHECKING:
    import torch

    from oneaccord import Group

__all__ = [
    "column_linear",
    "copy_to",
    "gather_from",
    "gather_sequence",
    "reduce_from",
    "reduce_scatter_sequence",
    "row_linear",
    "scatter_to",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]


def copy_to(x: torch.Tensor, group: Group, **options: Any) -> torch.Tensor:
    """Return the result of `oneaccord_parallel.copy_to`; autograd calls its ``vjp``.

    Parameters
    ----------
    x, group, **options
        As there.
    """
    return _apply("copy_to", lambda t: tensor_parallel.copy_to(t, group, **options), x)


def reduce_from(x: torch.Tensor, group: Group, **options: Any) -> torch.Tensor:
    """Return the result of `oneaccord_parallel.reduce_from`; autograd calls its ``vjp``.

    Parameters
    ----------
    x, group, **options
        As there.
    """
    return _apply("reduce_from", lambda t: tensor_parallel.reduce_from(t, group, **options), x)


def gather_from(x: torch.Tensor, group: Group, axis: int = -1, **options: Any) -> torch.Tensor:
    """Return the result of `oneaccord_parallel.gather_from`; autograd calls its ``vjp``.

    Parameters
    ----------
    x, group, axis, **options
        As there.
    """
    return _apply("gather_from", lambda t: tensor_parallel.gather_from(t, group, axis, **options), x)


def scatter_to(x: torch.Tensor, group: Group, axis: int = -1, **options: Any) -> torch.Tensor:
    """Return the result of `oneaccord_parallel.scatter_to`; autograd calls its ``vjp``.

    Parameters
    ----------
    x, group, axis, **options
        As there.
    """
    return _apply("scatter_to", lambda t: tensor_parallel.scatter_to(t, group, axis, **options), x)


def gather_sequence(x: torch.Tensor, group: Group, axis: int = 0, **options: Any) -> torch.Tensor:
    """Return the result of `oneaccord_parallel.gather_sequence`; autograd calls its ``vjp``.

    Parameters
    ----------
    x, group, axis, **options
        As there.
    """
    return _apply("gather_sequence", lambda t: tensor_parallel.gather_sequence(t, group, axis, **options), x)


def reduce_scatter_sequence(x: torch.Tensor, group: Group, axis: int = 0, **options: Any) -> torch.Tensor:
    """Return the result of `oneaccord_parallel.reduce_scatter_sequence`; autograd calls its ``vjp``.

    Parameters
    ----------
    x, group, axis, **options
        As there.
    """
    return _apply("reduce_scatter_sequence", lambda t: tensor_parallel.reduce_scatter_sequence(t, group, axis, **options), x)


def column_linear(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, group: Group, gather_output: bool = False, **options: Any
) -> torch.Tensor:
    """Return the result of `oneaccord_parallel.column_linear`; autograd calls its ``vjp``.

    Parameters
    ----------
    x, w, b, group, gather_output, **options
        As there.
    """
    return _apply(
        "column_linear", lambda *t: tensor_parallel.column_linear(t[0], t[1], t[2], group, gather_output, **options), x, w, b
    )


def row_linear(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, group: Group, input_is_sharded: bool = True, **options: Any
) -> torch.Tensor:
    """Return the result of `oneaccord_parallel.row_linear`; autograd calls its ``vjp``.

    Parameters
    ----------
    x, w, b, group, input_is_sharded, **options
        As there.
    """
    return _apply(
        "row_linear", lambda *t: tensor_parallel.row_linear(t[0], t[1], t[2], group, input_is_sharded, **options), x, w, b
    )


def vocab_parallel_embedding(ids: torch.Tensor, table: torch.Tensor, group: Group, **options: Any) -> torch.Tensor:
    """Return the result of `oneaccord_parallel.vocab_parallel_embedding`; autograd calls its ``vjp``.

    Parameters
    ----------
    ids, table, group, **options
        As there.
    """
    return _apply(
        "vocab_parallel_embedding", lambda rows: vocab_parallel.vocab_parallel_embedding(ids, rows, group, **options), table
    )


def vocab_parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, group: Group, **options: Any) -> torch.Tensor:
    """Return the result of `oneaccord_parallel.vocab_parallel_cross_entropy`; autograd calls its ``vjp``.

    Parameters
    ----------
    logits, targets, group, **options
        As there.
    """
    return _apply(
        "vocab_parallel_cross_entropy",
        lambda z: vocab_parallel.vocab_parallel_cross_entropy(z, targets, group, **options),
        logits,
    )


def _apply(name: str, call: Callable[..., Any], *tensors: torch.Tensor | None) -> Any:
    return _function().apply(name, call, *tensors)


@cache
def _function() -> Any:
    """Return the autograd function of a call and its `Vjp`; torch is imported when it is first used."""
    import torch

    from oneaccord_parallel.torch_second import differentiated_once

    class WithVjp(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, name: str, call: Callable[..., Any], *tensors: Any) -> Any:
            y, vjp = call(*tensors)
            ctx.save_for_backward(*vjp.saved)
            ctx.name, ctx.vjp, device = name, vjp.backward, y.device.type
            ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
            # Results of the inputs are saved without their history.
            given = set(map(id, tensors))
            ctx.computed = any(each.is_floating_point() and id(each) not in given for each in vjp.saved)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            saved = ctx.saved_tensors
            # Under it a result and a weight may have different dtypes, which it brings together here too.
            with torch.no_grad(), torch.autocast(*ctx.autocast):
                gradients = ctx.vjp(dy, *saved)
            depends = ctx.computed or any(each.requires_grad for each in (dy, *saved))
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            return None, None, *differentiated_once(ctx.name, gradients, depends=depends)

    return WithVjp
