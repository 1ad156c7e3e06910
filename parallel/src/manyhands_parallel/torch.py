"""For torch: modules whose gradients are averaged in the backward pass, layers on several ranks, and stages of a pipeline.

>>> sync = mp.torch.data_parallel(module, group)
>>> for x, y in batches:
...     optimizer.zero_grad()
...     with sync.step(weight=len(x)):
...         loss_of(module(x), y).backward()
...     optimizer.step()

Normalisation over all ranks: `convert_sync_batchnorm`. The tensor parallel functions do what those of `manyhands_parallel` do, but return the
result alone: autograd calls their ``vjp``. So every rank runs the same backward pass. They refuse a second derivative.

>>> hidden = torch.relu(mp.torch.column_linear(x, w1, b1, group))
>>> loss = mp.torch.row_linear(hidden, w2, b2, group).square().mean()
>>> loss.backward()
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from operator import is_
from typing import TYPE_CHECKING, Any

from manyhands.errors import UnsupportedError, UsageError
from manyhands_parallel.agreement import same_on_all
from manyhands_parallel.compress import Compression
from manyhands_parallel.gradients.buckets import Bucket
from manyhands_parallel.gradients.replicas import broadcast, give
from manyhands_parallel.gradients.sync import GradientSync, Step
from manyhands_parallel.pipeline.torch_stage import Stage
from manyhands_parallel.scaling import copy_divided
from manyhands_parallel.torch_tensor_parallel import (
    column_linear,
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    row_linear,
    scatter_to,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

if TYPE_CHECKING:
    from manyhands import Group
    from manyhands_parallel.torch_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "ModuleSync",
    "Stage",
    "SyncBatchNorm",
    "column_linear",
    "convert_sync_batchnorm",
    "copy_to",
    "data_parallel",
    "gather_from",
    "gather_sequence",
    "reduce_from",
    "reduce_scatter_sequence",
    "row_linear",
    "scatter_to",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]

_BATCH_NORM = "manyhands_parallel.torch_batch_norm"
"""The home of `SyncBatchNorm` and `convert_sync_batchnorm`. It imports torch, so that it is loaded when one of them is first used."""


def __getattr__(name: str) -> Any:
    if name not in ("SyncBatchNorm", "convert_sync_batchnorm"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(import_module(_BATCH_NORM), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def data_parallel(
    module: Any,
    group: Group,
    *,
    bucket_bytes: int = 25 << 20,
    first_bucket_bytes: int = 1 << 20,
    reproducible: bool = True,
    reduce_dtype: str | None = None,
    compress: Compression | None = None,
    broadcast_buffers: bool = True,
    timeout_s: float | None = None,
) -> ModuleSync:
    """Give rank 0's parameters and buffers to all ranks, and average the gradients of each backward pass from now on.

    Parameters
    ----------
    module
        A ``torch.nn.Module``, the same on all ranks; it is used as before. Parameters that are frozen now (``requires_grad`` is false) are not
        averaged. Move it to its device first; its optimizer may be made before or after. Of a module that was given before, with this group
        or with one that has failed, the new `ModuleSync` takes the place of the old one. Copies of the module are on their own.
    group
        The ranks that average.
    bucket_bytes, first_bucket_bytes, reproducible, reduce_dtype, compress, timeout_s
        As for `GradientSync`.
    broadcast_buffers
        Whether each step ends with rank 0's buffers, such as the running statistics of batch norm, on all ranks.

    Returns
    -------
    ModuleSync
        Its `ModuleSync.step` sets the weight of a pass.

    Raises
    ------
    UsageError
        The modules or options of the ranks differ; every rank raises it and says what differs. Or a parameter is averaged by the `data_parallel` of
        another module already. No parameter has changed.
    """
    return ModuleSync(
        module,
        group,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        reproducible=reproducible,
        reduce_dtype=reduce_dtype,
        compress=compress,
        broadcast_buffers=broadcast_buffers,
        timeout_s=timeout_s,
    )


_syncs: weakref.WeakKeyDictionary[Any, weakref.ref[ModuleSync]] = weakref.WeakKeyDictionary()
_owners: dict[int, tuple[weakref.ref[Any], weakref.ref[ModuleSync]]] = {}
"""The `ModuleSync` of each module; and of each parameter, by its identity."""


def _owner_of(parameter: Any) -> ModuleSync | None:
    found = _owners.get(id(parameter))
    return found[1]() if found is not None and found[0]() is parameter else None


def _forget(identity: int, _: object) -> None:
    _owners.pop(identity, None)


class _OnForward:
    """The hook of a module. A copy of the module, also one in a file, is on its own: its hook does nothing."""

    def __init__(self, sync: ModuleSync) -> None:
        self._sync = sync

    def __call__(self, module: Any, inputs: Any) -> None:
        self._sync._on_forward()

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Any:
    return _nothing


def _nothing(module: Any, inputs: Any) -> None:
    pass


class ModuleSync(GradientSync):
    """Averages the gradients of a module in its backward passes; `data_parallel` makes it.

    - ``with sync.step(weight=len(x)): loss.backward()`` averages with weights. A rank without data takes part: ``with sync.step(weight=0): pass``.
    - A ``loss.backward()`` outside of such a block is a step with weight 1. (Where parts of the module are recomputed by checkpoints with
      ``use_reentrant=True``, use the block.)
    - A step sets `SyncBatchNorm.loss_weight` of the module's layers to its weight, as long as it lasts. Where there are such layers, a rank without
      data calls module and ``backward()`` as well, with an empty batch: ``with sync.step(weight=0): module(x).sum().backward()``.
    - ``with sync.paused():`` around either adds up. The gradients of a paused pass are in the buckets and no longer in ``.grad``; weights add
      up as well, so that the loss of a batch is not divided by the number of batches.

    From the moment when its gradient is complete until the end of the step, ``.grad`` of a parameter is None. After a step it is the mean, a view of a
    bucket: the next step writes there. A parameter that no
    rank has used keeps the ``.grad`` that it had, None for instance. ``zero_grad`` may be called as usual, but discards nothing that paused
    passes have added up.

    If a step fails, ``.grad`` of what was on its way becomes None. If parameters are added or replaced, as ``load_state_dict(assign=True)`` does, the
    next forward or backward pass raises `UsageError`: call `data_parallel` again then.

    Attributes
    ----------
    module
        The module.
    group
        The ranks that average.
    memory
        What this holds: bytes by purpose.
    """

    def __init__(self, module: Any, group: Group, *, broadcast_buffers: bool = True, **options: Any) -> None:
        self.module: Any = module
        self._parameters = OrderedDict((name, each) for name, each in module.named_parameters() if each.requires_grad)
        self._frozen = OrderedDict((name, each) for name, each in module.named_parameters() if not each.requires_grad)
        self._all = list(module.parameters())
        self._own: Step | None = None  # the step of a backward pass outside of a block
        self._weighted: list[tuple[Any, float]] = []  # batch normalisations, and their weights outside of the step
        shared = self._shared()
        told = {name: f"averaged by the data_parallel of another module, a {kind}" for name, kind in shared.items()}
        same_on_all(group, "data_parallel", told, timeout_s=options.get("timeout_s"))
        if shared:
            name, kind = next(iter(shared.items()))
            raise UsageError(
                f"{name} is averaged by the data_parallel of another module already, a {kind}: give one module that holds both, such as "
                "torch.nn.ModuleList([one, two]), or remove() the other ModuleSync first"
            )
        super().__init__(group, self._parameters, **options)
        everything = OrderedDict([*module.named_parameters(), *module.named_buffers()])
        broadcast(everything, group, timeout_s=self._timeout_s)
        before = _syncs.get(module, lambda: None)()
        if before is not None:  # not before this one is sure to be made
            before.remove()
        self._gives_buffers = broadcast_buffers and any(True for _ in module.buffers())
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))
            for name, parameter in self._parameters.items()
        ]
        self._handles.append(module.register_forward_pre_hook(_OnForward(self)))
        _syncs[module] = weakref.ref(self)
        for each in self._parameters.values():
            forget = partial(_forget, id(each))
            _owners[id(each)] = weakref.ref(each, forget), weakref.ref(self)

    def _shared(self) -> dict[str, str]:
        """Return which parameters belong to another module's `ModuleSync`, with the class of that module."""
        owners = {name: _owner_of(parameter) for name, parameter in self._parameters.items()}
        return {
            name: type(owner.module).__name__
            for name, owner in owners.items()
            if owner is not None and owner.module is not self.module
        }

    def remove(self) -> None:
        """Take the hooks out of the module, whose gradients then stay on their rank. Calling it twice is fine."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters.values():
            if _owner_of(parameter) is self:
                del _owners[id(parameter)]

    def _check_parameters(self) -> None:
        """Refuse to go on with parameters that were not there when the hooks were set: their gradients would stay on each rank."""
        now = list(self.module.parameters())
        if len(now) == len(self._all) and all(map(is_, now, self._all)):
            return
        known = {id(each) for each in self._all}
        new = [name for name, each in self.module.named_parameters() if id(each) not in known]
        what = f"{', '.join(new[:5])} came into the module" if new else "parameters were taken out of the module"
        raise UsageError(
            f"{what} after data_parallel was called, by load_state_dict(assign=True), a new layer or a parametrization: their gradients would "
            "stay on each rank. Begin anew: sync = mp.torch.data_parallel(module, group)"
        )

    def _on_gradient(self, name: str, parameter: Any) -> None:
        """Take the gradient of a parameter; torch calls it when that is complete."""
        try:
            self._take(name, parameter)
        except BaseException as error:
            if self._own is not None:  # nobody else ends this step
                self._own = None
                self._abandon(error)
            raise

    def _begin(self, step: Step, weight: float) -> None:
        self._check_parameters()
        thawed = [name for name, each in self._frozen.items() if each.requires_grad]
        if thawed:
            raise UsageError(
                f"{', '.join(thawed[:5])} had no gradients when data_parallel was called, and have now: they would stay on each rank. "
                "Begin anew: sync = mp.torch.data_parallel(module, group)"
            )
        super()._begin(step, weight)
        layers: Any = sys.modules.get(_BATCH_NORM)
        if layers is not None:
            norms = [each for each in self.module.modules() if isinstance(each, layers.SyncBatchNorm)]
            self._weighted = [(each, each.loss_weight) for each in norms]
            for each in norms:
                each.loss_weight = weight

    def _restore(self) -> None:
        """Give the batch normalisations back the weights that they had before the step."""
        for each, before in self._weighted:
            each.loss_weight = before
        self._weighted = []

    def _take(self, name: str, parameter: Any) -> None:
        step = self._step
        if step is None:
            from torch.autograd import Variable

            step = self.step()
            step.__enter__()
            self._own = step
            Variable._execution_engine.queue_callback(self._on_end)
        view = self._home[name].views[name]
        gradient = parameter.grad
        if gradient is not view:
            if gradient.is_sparse:
                raise UnsupportedError(f"the gradient of {name!r} is sparse; give the layer sparse=False")
            gradient = gradient.detach()
        parameter.grad = None  # a call in the background may write to the bucket from now on
        self._arrive(name, gradient)

    def _on_end(self) -> None:
        """End the step of a backward pass outside of a block."""
        step, self._own = self._own, None
        assert step is not None
        step.__exit__(None, None, None)

    def _on_forward(self) -> None:
        self._check_parameters()
        if self._own is not None:
            from torch import _C

            if _C._current_graph_task_id() == -1:  # not what a checkpoint computes again
                self._own = None
                self._abandon(UsageError("the backward pass did not come to its end"))
                raise UsageError(f"this {type(self).__name__} cannot go on, since {self._spoilt}; make a new one on all ranks")

    def _check(self, name: str, gradient: Any) -> None:
        raise UsageError("the gradients of a module become ready in its backward pass: with sync.step(): loss.backward()")

    def _send(self, bucket: Bucket) -> None:
        for name, view in bucket.views.items():
            if name not in self._used and self._parameters[name].grad is view:
                self._parameters[name].grad = view.clone()  # what was there before stays, if no rank uses it
        super()._send(bucket)

    def _summed(self, bucket: Bucket) -> None:
        total = self._total_weight()
        if total:
            copy_divided(bucket.values, bucket.values, total)

    def _hand_over(self, step: Step, divisor: float) -> None:
        for bucket in self._buckets:
            unused = bucket.unused() if not self._used.issuperset(bucket.views) else set()
            for name, view in bucket.views.items():
                if name not in unused:
                    parameter = self._parameters[name]
                    parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
                    step._means[name] = parameter.grad

    def _end(self, step: Step) -> None:
        self._restore()
        super()._end(step)
        if self._gives_buffers and not step.is_paused:
            with self._unread_statistics():
                give(dict(self.module.named_buffers()), self.group, 0, timeout_s=self._timeout_s)

    @contextmanager
    def _unread_statistics(self) -> Iterator[None]:
        """Let autograd not see that the running statistics change: it keeps them for a backward pass to come, which does not read them.

        So two forward passes may come before two backward passes. Statistics of layers in eval mode are read, and their changes are seen.
        """
        import torch
        from torch.nn.modules.batchnorm import _NormBase

        norms = [each for each in self.module.modules() if isinstance(each, _NormBase) and each.training]
        with ExitStack() as stack:
            for buffer in (buffer for norm in norms for buffer in norm.buffers(recurse=False)):
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(buffer))
            yield

    def _abandon(self, error: BaseException) -> None:
        super()._abandon(error)
        self._restore()
        for name, parameter in self._parameters.items():
            if parameter.grad is self._home[name].views[name]:
                parameter.grad = None

    def _make_buckets(self, order: list[str]) -> None:
        held = [name for name, bucket in self._home.items() if self._parameters[name].grad is bucket.views[name]]
        super()._make_buckets(order)
        for name in held:
            view = self._home[name].views[name]
            view.copy_(self._parameters[name].grad)
            self._parameters[name].grad = view
