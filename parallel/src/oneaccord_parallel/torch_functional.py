"""Collectives that torch's autograd follows: the gradient of each is a collective as well.

>>> mean = mp.torch.functional.all_reduce(features.mean(0), group, "mean")
>>> everyone = mp.torch.functional.all_gather(embeddings, group)

The loss is the sum of all tensors on which ranks call ``backward()``: ``x.grad`` is its derivative. If all ranks compute one and the same loss from a result, each
counts: divide it by ``group.world_size``, or take `oneaccord_parallel.torch.reduce_from` and its kin, which are made for that.

Every rank makes the same calls and runs the same backward pass, so that a tensor requires grad on all ranks or on none. Results can be differentiated as often
as wanted. The collectives of `oneaccord.Group` refuse tensors that require grad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from oneaccord.errors import UsageError
from oneaccord_parallel.agreement import need_group

if TYPE_CHECKING:
    import torch

    from oneaccord import Group

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]


def all_reduce(
    x: torch.Tensor, group: Group, op: str = "sum", *, reproducible: bool | None = None, timeout_s: float | None = None
) -> torch.Tensor:
    """Return the sum or the mean of all ranks' tensors; its gradient is that of all ranks' gradients.

    Parameters
    ----------
    x
        A tensor of the same shape and dtype on all ranks.
    group
        The ranks.
    op
        ``"sum"`` or ``"mean"``.
    reproducible, timeout_s
        As for `oneaccord.Group.all_reduce`; for the backward pass as well.

    Raises
    ------
    UsageError
        ``op`` is another one.
    """
    _need_linear(op, "all_reduce", group)
    return _apply(
        lambda t: group.all_reduce(t, op, reproducible=reproducible, timeout_s=timeout_s),
        lambda dy: all_reduce(dy, group, op, reproducible=reproducible, timeout_s=timeout_s),
        x,
    )


def all_gather(
    x: torch.Tensor,
    group: Group,
    *,
    counts: Sequence[int] | None = None,
    uneven: bool = False,
    reproducible: bool | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor:
    """Return the rows of all ranks, in the order of ranks; the gradient of this rank's is the sum of theirs over all ranks.

    Parameters
    ----------
    x
        A tensor, alike on all ranks but for its number of rows.
    group
        The ranks.
    counts
        How many rows each rank has, if they differ.
    uneven
        Whether numbers of rows may differ and are not known: they travel first.
    reproducible
        How the backward pass sums; as for `oneaccord.Group.reduce_scatter`.
    timeout_s
        As for `oneaccord.Group.all_gather`; for the backward pass as well.
    """
    need_group(group)
    shape = x.shape  # kept for the backward pass, which needs nothing else of x
    if uneven and counts is None:
        rows = np.array([x.shape[0] if x.ndim else 1])
        counts = tuple(int(each) for each in group.all_gather(rows, timeout_s=timeout_s))
    return _apply(
        lambda t: group.all_gather(t, counts=counts, timeout_s=timeout_s),
        lambda dy: reduce_scatter(dy, group, counts=counts, reproducible=reproducible, timeout_s=timeout_s).reshape(shape),
        x,
    )


def reduce_scatter(
    x: torch.Tensor,
    group: Group,
    op: str = "sum",
    *,
    counts: Sequence[int] | None = None,
    reproducible: bool | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor:
    """Return this rank's rows of the sum or mean of all ranks' tensors; the gradient has those of all ranks' gradients.

    Parameters
    ----------
    x
        A tensor of the same shape and dtype on all ranks.
    group
        The ranks.
    op
        ``"sum"`` or ``"mean"``.
    counts
        How many rows each rank gets; by default as many.
    reproducible, timeout_s
        As for `oneaccord.Group.reduce_scatter`; for the backward pass as well, in which ``reproducible`` decides how a second derivative is summed.

    Raises
    ------
    UsageError
        ``op`` is another one.
    """
    _need_linear(op, "reduce_scatter", group)
    divisor = group.world_size if op == "mean" else 1
    shape = x.shape
    options: dict[str, Any] = {"counts": counts, "reproducible": reproducible, "timeout_s": timeout_s}
    return _apply(
        lambda t: group.reduce_scatter(t, op, **options),
        lambda dy: all_gather(dy, group, **options).reshape(shape) / divisor,
        x,
    )


def all_to_all(
    x: torch.Tensor,
    group: Group,
    *,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor:
    """Give each rank some rows, and return the rows that came from each; gradients go back to the rank of the rows.

    Parameters
    ----------
    x
        A tensor, alike on all ranks but for its number of rows.
    group
        The ranks.
    send_counts
        How many rows go to each rank; by default as many to each.
    receive_counts
        How many come from each rank; if they are not given, they travel first.
    timeout_s
        As for `oneaccord.Group.all_to_all`; for the backward pass as well.
    """
    need_group(group)
    if send_counts is not None and receive_counts is None:
        receive_counts = tuple(int(each) for each in group.all_to_all(np.array(send_counts), timeout_s=timeout_s))
    return _apply(
        lambda t: group.all_to_all(t, send_counts=send_counts, receive_counts=receive_counts, timeout_s=timeout_s),
        lambda dy: all_to_all(dy, group, send_counts=receive_counts, receive_counts=send_counts, timeout_s=timeout_s),
        x,
    )


def broadcast(
    x: torch.Tensor, group: Group, root: int = 0, *, reproducible: bool | None = None, timeout_s: float | None = None
) -> torch.Tensor:
    """Return the root's tensor; the root's gradient is the sum over all ranks, and that of the others is zero.

    Parameters
    ----------
    x
        A tensor of the same shape and dtype on all ranks. It is not changed.
    group
        The ranks.
    root
        The rank whose values they are.
    reproducible
        How the backward pass sums; as for `oneaccord.Group.reduce`.
    timeout_s
        As for `oneaccord.Group.broadcast`; for the backward pass as well.
    """
    need_group(group)
    return _apply(
        lambda t: group.broadcast(t, root, timeout_s=timeout_s),
        lambda dy: _sum_on_root(dy, group, root, reproducible, timeout_s),
        x,
    )


def _sum_on_root(x: torch.Tensor, group: Group, root: int, reproducible: bool | None, timeout_s: float | None) -> torch.Tensor:
    def call(tensor: torch.Tensor) -> torch.Tensor:
        total = group.reduce(tensor, root=root, reproducible=reproducible, timeout_s=timeout_s)
        return tensor.new_zeros(tensor.shape) if total is None else total

    return _apply(call, lambda dy: broadcast(dy, group, root, reproducible=reproducible, timeout_s=timeout_s), x)


def _need_linear(op: Any, what: str, group: Any) -> None:
    need_group(group)
    if op not in ("sum", "mean"):
        raise UsageError(f"{what} has a gradient only for op='sum' and op='mean', not for {op!r}")


def _apply(call: Callable[..., Any], adjoint: Callable[..., Any], x: torch.Tensor) -> Any:
    return _function().apply(call, adjoint, x)


@cache
def _function() -> Any:
    """Return the autograd function of a collective and its adjoint; torch is imported when it is first used."""
    import torch

    class Collective(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, call: Callable[..., Any], adjoint: Callable[..., Any], x: Any) -> Any:
            ctx.adjoint = adjoint
            return call(x)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return None, None, ctx.adjoint(dy)

    return Collective
