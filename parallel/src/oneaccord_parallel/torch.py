"""For torch: modules whose gradients are averaged in the backward pass, layers on several ranks, and stages of a pipeline.

>>> sync = mp.torch.data_parallel(module, group)
>>> for x, y in batches:
...     optimizer.zero_grad()
...     with sync.step(weight=len(x)):
...         loss_of(module(x), y).backward()
...     optimizer.step()

Normalisation over all ranks: `convert_sync_batchnorm`. Collectives with gradients: ``mp.torch.functional``. The tensor parallel functions do what those of `oneaccord_parallel` do, but return the
result alone: autograd calls their ``vjp``. So every rank runs the same backward pass. They refuse a second derivative with an
`UnsupportedError`.

>>> hidden = torch.relu(mp.torch.column_linear(x, w1, b1, group))
>>> loss = mp.torch.row_linear(hidden, w2, b2, group).square().mean()
>>> loss.backward()
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from operator import is_
from typing import TYPE_CHECKING, Any

from oneaccord.errors import UnsupportedError, UsageError
from oneaccord_parallel import torch_functional as functional
from oneaccord_parallel.agreement import same_on_all
from oneaccord_parallel.arrays import oddity, writable
from oneaccord_parallel.compress import Compression
from oneaccord_parallel.gradients.buckets import Bucket
from oneaccord_parallel.gradients.replicas import broadcast, give
from oneaccord_parallel.gradients.sync import GradientSync, Step
from oneaccord_parallel.pipeline.torch_stage import Stage
from oneaccord_parallel.scaling import copy_divided
from oneaccord_parallel.torch_tensor_parallel import (
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
    from oneaccord import Group
    from oneaccord_parallel.torch_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "ModuleSync",
    "Stage",
    "SyncBatchNorm",
    "column_linear",
    "convert_sync_batchnorm",
    "copy_to",
    "data_parallel",
    "functional",
    "gather_from",
    "gather_sequence",
    "reduce_from",
    "reduce_scatter_sequence",
    "row_linear",
    "scatter_to",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]

_BATCH_NORM = "oneaccord_parallel.torch_batch_norm"
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
        averaged; those among them, and buffers, that torch does not write to, such as expanded ones, are replaced. Move it to its device first; its optimizer may be made before or after. Modules that share a parameter are wrapped as one, such as
        ``torch.nn.ModuleList([one, two])``. If a module is given again, the new `ModuleSync` replaces the old one.
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
        The modules or options of the ranks differ, or the `ModuleSync` of another module averages one of the parameters; every rank raises it and says what is
        wrong. No parameter has changed.
    LayoutError
        A parameter or buffer is sparse, quantized, or without memory.
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


class ModuleSync(GradientSync):
    """Averages the gradients of a module in its backward passes; `data_parallel` makes it.

    - ``with sync.step(weight=len(x)): loss.backward()`` averages with weights. A rank without data takes part: ``with sync.step(weight=0): pass``.
    - A ``loss.backward()`` outside of such a block is a step with weight 1. (If parts of the module are recomputed by checkpoints with
      ``use_reentrant=True``, use the block.)
    - A step sets `SyncBatchNorm.loss_weight` of the module's layers to its weight, as long as it lasts. If there are such layers, a rank without
      data calls module and ``backward()`` as well, with an empty batch: ``with sync.step(weight=0): module(x).sum().backward()``.
    - ``with sync.paused():`` around either adds up. The gradients of a paused pass are in the buckets and no longer in ``.grad``; weights add
      up as well, so that the loss of a batch is not divided by the number of batches.

    After a step, ``.grad`` of a parameter is the mean, a view of a bucket: the next step writes there. Until the step has ended it is None, for other
    hooks as well: clip gradients and call the optimizer after the block. A parameter that no rank has used keeps the ``.grad`` that it had,
    None for instance. ``zero_grad`` may be called as usual, but discards nothing that paused passes have added up.

    If a step fails, every ``.grad`` that was on its way becomes None.

    Parameters that are added or replaced later (a new layer, ``load_state_dict(assign=True)``, a parametrization), unfrozen, or converted to another
    dtype or device would have gradients of their rank alone: the next pass is refused with a `UsageError`. Wrap the module again after such
    a change: ``sync = mp.torch.data_parallel(module, group)``. So is a pass without some of the parameters. ``loss.backward(create_graph=True)`` is refused too, since a
    mean has no graph. Copies of the module (``copy.deepcopy``, ``torch.save``) are plain modules, whose gradients stay on their rank.

    Attributes
    ----------
    module
        The module.
    group
        The ranks that average.
    memory
        The memory that this holds: bytes by purpose.
    """

    def __init__(self, module: Any, group: Group, *, broadcast_buffers: bool = True, **options: Any) -> None:
        self.module: Any = module
        self._parameters = OrderedDict((name, each) for name, each in module.named_parameters() if each.requires_grad)
        self._kinds = [(each.dtype, each.device) for each in self._parameters.values()]
        self._own: Step | None = None  # the step of a backward pass outside of a block
        self._weighted: list[tuple[Any, float]] = []  # batch normalisations, and their weights outside of the step
        before = self._syncs_before(group, options.get("timeout_s"))
        super().__init__(group, self._parameters, **options)
        everything = OrderedDict([*module.named_parameters(), *module.named_buffers()])
        self._put(everything, broadcast(everything, group, timeout_s=self._timeout_s))
        for each in before:
            each.remove()
        self._gives_buffers = broadcast_buffers and any(True for _ in module.buffers())
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_Hook(self, partial(self._on_gradient, name)))
            for name, parameter in self._parameters.items()
        ]
        self._found = _parts(module)
        self._frozen = [each for each in module.parameters() if not each.requires_grad]
        self._handles += [each.register_forward_pre_hook(_Hook(self, self._on_forward)) for each in _called_first(module)]

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if name.startswith("_") or not hasattr(module, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        raise AttributeError(
            f"data_parallel returns no module: use .{name} of the module that it was given, which is used as before (it is .module here)",
            name=name,
            obj=self,
        )

    def _syncs_before(self, group: Group, timeout_s: float | None) -> set[ModuleSync]:
        """Return the syncs that this one replaces: those of this module, and those that cannot continue. Raise an error for another module's parameters."""
        owned = {}
        hooks = self.module._forward_pre_hooks.values()  # all parameters may be new
        before = {
            each.sync for each in hooks if isinstance(each, _Hook) and each.sync is not None and each.sync.module is self.module
        }
        for name, parameter in self._parameters.items():
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            for sync in {each.sync for each in hooks.values() if isinstance(each, _Hook) and each.sync is not None}:
                if sync.module is self.module or sync._spoilt or not sync.group.is_usable:
                    before.add(sync)
                else:
                    owned[name] = f"averaged by the data_parallel of another module, a {type(sync.module).__name__}"
        fixed = {
            name: "one whose elements share memory, or that torch does not write to"
            for name, each in self._parameters.items()
            if not (oddity(each) or writable(each))
        }
        same_on_all(group, "data_parallel", owned | fixed, timeout_s=timeout_s)
        if fixed:
            name, words = next(iter(fixed.items()))
            raise UsageError(
                f"the parameter {name} is {words}, so that it cannot be trained: make it of a copy, torch.nn.Parameter(x.clone())"
            )
        if owned:
            name, owner = next(iter(owned.items()))
            raise UsageError(
                f"{name} is {owner} already: give one module that holds both, such as torch.nn.ModuleList([one, two]), or remove() the other "
                "ModuleSync first"
            )
        return before

    def _put(self, given: dict[str, Any], found: dict[str, Any]) -> None:
        """Put tensors in the place of buffers and frozen parameters that torch does not write to, such as expanded ones."""
        from torch.nn import Parameter

        new = {id(each): found[name] for name, each in given.items() if found[name] is not each}
        new |= {
            id(each): Parameter(new[id(each)], False)
            for each in given.values()
            if id(each) in new and isinstance(each, Parameter)
        }
        for module in self.module.modules() if new else ():
            for held in (module._buffers, module._parameters):
                held.update({name: new[id(each)] for name, each in held.items() if id(each) in new})

    def remove(self) -> None:
        """Take the hooks out of the module, whose gradients then stay on their rank; this takes no further steps. Calling it twice is fine."""
        for handle in self._handles:
            handle.remove()
        self._spoilt = self._spoilt or "it was taken out of its module by remove()"

    def _on_gradient(self, name: str, parameter: Any) -> None:
        """Take the gradient of a parameter; torch calls it when that is complete."""
        try:
            self._take(name, parameter)
        except BaseException as error:
            if self._own is not None:  # no other code ends this step
                self._own = None
                self._abandon(error)
            raise

    def _check_parameters(self) -> None:
        """Refuse parameters whose gradients nothing averages. It costs little as long as nothing has changed."""
        parts = self._found
        if any(each.requires_grad for each in self._frozen) or not (
            all(len(now) == len(then) and all(map(is_, now.values(), then)) for now, then in parts)
        ):
            self._look_again()
        kinds = [(each.dtype, each.device) for each in self._parameters.values()]
        if kinds != self._kinds:
            name, now, then = next(
                each for each in zip(self._parameters, kinds, self._kinds, strict=True) if each[1] != each[2]
            )
            raise UsageError(
                f"{name} was {then[0]} on {then[1]} when data_parallel was called, and is {now[0]} on {now[1]} now. {_ANEW}"
            )

    def _look_again(self) -> None:
        """Compare all parameters with those of the beginning."""
        now = dict(self.module.named_parameters())
        averaged, frozen, present = (set(map(id, some)) for some in (self._parameters.values(), self._frozen, now.values()))
        alone = {name: each for name, each in now.items() if each.requires_grad and id(each) not in averaged}
        thawed = [name for name, each in alone.items() if id(each) in frozen]
        if thawed:
            raise UsageError(
                f"{', '.join(thawed[:5])} had no gradients when data_parallel was called, and have now: they would stay on each rank. {_ANEW}"
            )
        new = ", ".join([*alone][:5]) + (f" and {len(alone) - 5} more" if len(alone) > 5 else "")
        if alone or not averaged <= present:
            raise UsageError(
                f"{f'{new} came into the module' if new else 'parameters were taken out of the module'} after data_parallel was called, by "
                f"load_state_dict(assign=True), a new layer or a parametrization: their gradients would stay on each rank. {_ANEW}"
            )
        self._found = _parts(self.module)
        self._frozen = [each for each in now.values() if not each.requires_grad]

    def _begin(self, step: Step, weight: float) -> None:
        self._check_parameters()
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
        gradient = parameter.grad
        if gradient is not self._home[name].views[name]:
            if gradient.is_sparse:
                raise UnsupportedError(f"the gradient of {name!r} is sparse; give the layer sparse=False")
            if gradient.requires_grad:
                raise UnsupportedError(
                    f"the gradient of {name!r} has a graph of its own, but its mean has none: compute second derivatives by "
                    "torch.autograd.grad(..., create_graph=True), and call loss.backward() without it"
                )
            gradient = gradient.detach()
        self._arrive(name, gradient)
        parameter.grad = None  # a call in the background may write to the bucket until the step has ended

    def _on_end(self) -> None:
        """End the step of a backward pass outside of a block."""
        step, self._own = self._own, None
        assert step is not None
        step.__exit__(None, None, None)

    def _on_forward(self, module: Any, inputs: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:  # a checkpoint computes it again
            return
        if self._own is not None:
            self._own = None
            self._abandon(UsageError("the backward pass did not come to its end"))
            raise UsageError(f"this {type(self).__name__} cannot continue, because {self._spoilt}; make a new one on all ranks")
        if torch.is_grad_enabled() and not self._spoilt and self.group.is_usable:
            self._check_parameters()

    def _check(self, name: str, gradient: Any) -> None:
        raise UsageError("the gradients of a module become ready in its backward pass: with sync.step(): loss.backward()")

    def _send(self, bucket: Bucket) -> None:
        for name, view in bucket.views.items():
            if name not in self._used and self._parameters[name].grad is view:
                self._parameters[name].grad = view.clone()  # the old gradient stays, if no rank uses it
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
            self._give_buffers()

    def _give_buffers(self) -> None:
        """Give rank 0's buffers to all ranks. torch refuses to continue with a graph whose buffers have changed, so it must not see any other change."""
        from torch import empty_like
        from torch.nn.modules.batchnorm import _NormBase

        buffers = OrderedDict(self.module.named_buffers())
        # In training, a backward pass does not read these.
        unread = {
            id(each)
            for one in self.module.modules()
            if isinstance(one, _NormBase) and one.training
            for each in one.buffers(False)
        }
        # Writing to .data changes no version. Rank 0 only reads.
        read = [name for name, each in buffers.items() if self.group.rank and id(each) not in unread]
        targets = {name: each.data for name, each in buffers.items()}
        targets |= {name: empty_like(targets[name]) for name in read}
        give(targets, self.group, 0, timeout_s=self._timeout_s)
        changed = _differ([(buffers[name].data, targets[name]) for name in read])
        for name, is_new in zip(read, changed, strict=True):
            if is_new:
                buffers[name].detach().copy_(targets[name])

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


_ANEW = "Begin again: sync = mp.torch.data_parallel(module, group)"


class _Hook:
    """The hooks of a `ModuleSync` in modules and parameters. It does nothing in a copy of the module, which is a plain one."""

    def __init__(self, sync: ModuleSync | None = None, call: Callable[..., None] | None = None) -> None:
        self.sync = sync
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None:
            self._call(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _differ(pairs: list[tuple[Any, Any]]) -> list[bool]:
    """Return which pairs of tensors differ in a bit. Each device is waited for once, however many pairs there are."""
    from torch import stack, uint8

    flags = [(one.reshape(-1).view(uint8) != other.reshape(-1).view(uint8)).any() for one, other in pairs]
    of_devices: dict[Any, list[int]] = {}
    for number, flag in enumerate(flags):
        of_devices.setdefault(flag.device, []).append(number)
    found: dict[int, bool] = {}
    for numbers in of_devices.values():
        found.update(zip(numbers, stack([flags[number] for number in numbers]).tolist(), strict=True))
    return [found[number] for number in range(len(pairs))]


def _parts(module: Any) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return the dicts in which modules keep parameters and modules, and their present contents."""
    parts = [each for one in module.modules() for each in (one._parameters, one._modules)]
    return [(each, list(each.values())) for each in parts]


def _called_first(module: Any) -> Iterator[Any]:
    """Yield the module and its children; a program may call the children alone, as it must if a module has no ``forward``, such as ModuleList."""
    from torch import nn

    yield module
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called_first(child)
        else:
            yield child
