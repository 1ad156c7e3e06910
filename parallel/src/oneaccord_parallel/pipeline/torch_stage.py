"""A module of torch as a stage of a pipeline; its gradients are made by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oneaccord.errors import UsageError
from oneaccord_parallel.pipeline import stages

if TYPE_CHECKING:
    import torch

__all__ = ["Stage"]


class Stage(stages.Stage):
    """A module as a stage. Its gradients are a dict by the names of its parameters, those that do not require one left out.

    The loss of a pipeline whose last stage is one is a function of torch: ``loss(output, target)`` returns a tensor of one element.

    A schedule that divides the backward pass costs more here: autograd goes twice through the module.

    Parameters
    ----------
    module
        ``module(x)`` gets a tensor, or the tensors of a tuple as one tuple, and returns a tensor or a tuple of tensors. Arrays from a stage of
        NumPy become tensors.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(self._run_forward, self._run_backward, self._run_backward_weight)
        self.module = module

    def _whole_backward(self, saved: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradients of inputs and parameters, by one walk through the graph."""
        names, parameters = self._parameters()
        x, inputs, outputs = saved
        found = _gradients(outputs, [*inputs, *parameters], dy)
        return _like(x, inputs, found[: len(inputs)]), dict(zip(names, found[len(inputs) :], strict=True))

    def _evaluate(self, x: Any) -> Any:
        """Return the output of the module, without a graph."""
        import torch

        parts = tuple(torch.as_tensor(part) for part in (x if isinstance(x, tuple) else (x,)))
        with torch.no_grad():
            return self.module(parts if isinstance(x, tuple) else parts[0])

    def _loss_of(self, loss: Callable[[Any, Any], Any], output: Any, target: Any) -> tuple[Any, Any]:
        """Return the loss and its gradient, by autograd."""
        import torch

        x, inputs = _leaves(output)
        with torch.enable_grad():
            value = loss(x, target)
            if not isinstance(value, torch.Tensor):
                raise UsageError(f"loss returned a {type(value).__name__}; expected a tensor of one element")
            found = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
        return value.detach(), _like(x, inputs, list(found))

    def _value_of(self, loss: Callable[[Any, Any], Any], output: Any, target: Any) -> Any:
        """Return the loss, without a graph."""
        import torch

        with torch.no_grad():
            return loss(output, target)

    def _parameters(self) -> tuple[list[str], list[Any]]:
        wanted = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        return list(wanted), list(wanted.values())

    def _run_forward(self, x: Any) -> tuple[Any, Any]:
        import torch

        x, inputs = _leaves(x)
        with torch.enable_grad():
            output = self.module(x)
        outputs = output if isinstance(output, tuple) else (output,)
        given = tuple(each.detach() for each in outputs)
        return given if isinstance(output, tuple) else given[0], (x, inputs, outputs)

    def _run_backward(self, saved: Any, dy: Any) -> tuple[Any, Any]:
        x, inputs, outputs = saved
        found = _gradients(outputs, inputs, dy, keep=True)
        return _like(x, inputs, found), (outputs, dy)

    def _run_backward_weight(self, kept: Any) -> Any:
        names, parameters = self._parameters()
        return dict(zip(names, _gradients(kept[0], parameters, kept[1]), strict=True))


def _leaves(x: Any) -> tuple[Any, list[Any]]:
    """Return tensors whose graph begins here, and those of them that can have a gradient."""
    import torch

    parts = [torch.as_tensor(part).detach() for part in (x if isinstance(x, tuple) else (x,))]
    for part in parts:
        part.requires_grad_(part.is_floating_point() or part.is_complex())
    return tuple(parts) if isinstance(x, tuple) else parts[0], [part for part in parts if part.requires_grad]


def _gradients(outputs: tuple[Any, ...], inputs: list[Any], dy: Any, *, keep: bool = False) -> list[Any]:
    import torch

    dys = dy if isinstance(dy, tuple) else (dy,)
    pairs = [(output, each) for output, each in zip(outputs, dys, strict=True) if output.requires_grad and each is not None]
    if not inputs or not pairs:
        return [torch.zeros_like(each) for each in inputs]
    found = torch.autograd.grad(
        [output for output, _ in pairs], inputs, [each for _, each in pairs], retain_graph=keep, allow_unused=True,
        materialize_grads=True,
    )  # fmt: skip
    return list(found)


def _like(x: Any, inputs: list[Any], gradients: list[Any]) -> Any:
    """Return gradients in the structure of ``x``, None for a part that has none."""
    by_input = {id(each): gradient for each, gradient in zip(inputs, gradients, strict=True)}
    found = tuple(by_input.get(id(part)) for part in (x if isinstance(x, tuple) else (x,)))
    return found if isinstance(x, tuple) else found[0]
