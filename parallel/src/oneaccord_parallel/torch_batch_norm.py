"""A module of torch that normalises over the batches of all ranks, on CPUs and GPUs; this module needs torch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import batch_norm as batch_norm_of_one

from oneaccord import Group
from oneaccord.errors import UsageError
from oneaccord_parallel.normalization import RunningStats, batch_norm, batch_norm_backward
from oneaccord_parallel.torch_second import differentiated_once

if TYPE_CHECKING:

    class _BatchNorm:  # the public class has complete types without torch as well
        def __init__(self, *arguments: Any, **named: Any) -> None: ...
        def __call__(self, x: Any) -> Any: ...
        def __getattr__(self, name: str) -> Any: ...
else:
    from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


class SyncBatchNorm(_BatchNorm):
    """`batch_norm` as a ``torch.nn.Module``, for inputs of shape ``(n, channels, ...)``; n may differ between ranks, and be 0.

    It has the parameters, buffers and state of ``torch.nn.BatchNorm1d``, 2d and 3d. Every forward pass in training, and its backward pass,
    calls a collective, so that all ranks must make them, in the same order. In evaluation, no message is sent. The gradients of weight
    and bias are this rank's part, as those of ``torch.nn.SyncBatchNorm``.

    Parameters
    ----------
    num_features
        The number of channels.
    group
        The ranks. Copies of the module share it.
    eps, momentum, affine, track_running_stats, device, dtype
        As for ``torch.nn.BatchNorm1d``.

    Attributes
    ----------
    group
        The ranks; None in a module that ``torch.load`` made, until it is set: only evaluation works without.
    loss_weight
        The weight of this rank's loss in the next backward passes, as the weight of `batch_norm_backward`; 1 at first. `ModuleSync.step` sets it.
        If other means average the gradients of unequal batches, set it to their weight.

    Raises
    ------
    UsageError
        From the forward pass: the input has fewer than two axes; or as `batch_norm`.
    """

    def __init__(
        self,
        num_features: int,
        group: Group,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.group: Group | None = group
        self.loss_weight: float = 1.0

    def forward(self, x: Any) -> Any:
        """Return the normalised input.

        Parameters
        ----------
        x
            A tensor of shape ``(n, channels, ...)``.
        """
        if x.ndim < 2:
            raise UsageError(
                f"SyncBatchNorm takes tensors of shape (n, channels, ...), but this one has shape {tuple(x.shape)}"
            )
        if self.training:
            if self.group is None:
                raise UsageError(
                    "this SyncBatchNorm was loaded from a file, which cannot hold a group: give it one with mp.torch.convert_sync_batchnorm(module, group)"
                )
            return _Normalised.apply(x, self.weight, self.bias, self)
        alone = self.running_mean is None
        return batch_norm_of_one(x, self.running_mean, self.running_var, self.weight, self.bias, alone, 0.0, self.eps)

    def _stats(self) -> RunningStats | None:
        """Return the buffers; writes to them are in place."""
        if self.running_mean is None:
            return None
        stats = RunningStats(self.num_features, like=self.running_mean)
        stats.mean, stats.var, stats.count = self.running_mean, self.running_var, self.num_batches_tracked
        return stats

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.group)] = self.group
        clone = SyncBatchNorm.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"group": None}  # a file has no group


class _Normalised(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, module: SyncBatchNorm) -> Any:
        y, cache = batch_norm(x, weight, bias, module.group, eps=module.eps, running=module._stats(), momentum=module.momentum)
        # As saved tensors, they are checked for writes in place, and hooks may offload or recompute them.
        ctx.save_for_backward(x, weight, bias)
        ctx.cache, ctx.module = replace(cache, x=None, gamma=None, beta=None), module
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight, bias = ctx.saved_tensors
        with torch.no_grad():
            cache = replace(ctx.cache, x=x, gamma=weight, beta=bias)
            gradients = batch_norm_backward(dy, cache, weight=ctx.module.loss_weight)
        depends = any(each is not None and each.requires_grad for each in (dy, x, weight))
        return *differentiated_once("SyncBatchNorm", gradients, depends=depends), None


def convert_sync_batchnorm(module: Any, group: Group) -> Any:
    """Replace the batch normalisations of a module by `SyncBatchNorm`, with the same parameters and buffers.

    Parameters
    ----------
    module
        A ``torch.nn.Module``; its BatchNorm1d, 2d, 3d and SyncBatchNorm are replaced, at any depth.
    group
        The ranks.

    Returns
    -------
    Module
        The module, changed in place; the new one, if it is a batch normalisation itself.
    """
    if not isinstance(module, _BatchNorm):
        for name, child in list(module.named_children()):
            setattr(module, name, convert_sync_batchnorm(child, group))
        return module
    new: Any = SyncBatchNorm(module.num_features, group, module.eps, module.momentum, module.affine, module.track_running_stats)
    new.weight, new.bias = module.weight, module.bias
    new.running_mean, new.running_var = module.running_mean, module.running_var
    new.num_batches_tracked = module.num_batches_tracked
    return new.train(module.training)
