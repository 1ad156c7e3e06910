"""Optimizers that update an array in place: the elementwise ones that most training uses.

Their arithmetic is that of torch.optim, operation by operation, so that a run can be compared with one of torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from oneaccord.errors import UsageError
from oneaccord_parallel.arrays import Array, namespace

__all__ = ["SGD", "Adam", "AdamW", "ByName", "Update", "takes_name"]

Update = Callable[..., None]
"""``update(param, grad, state)`` changes ``param`` in place. ``state`` is a dict of its own for each parameter, empty at first.

If it has a parameter that is called ``name``, it gets the name of the parameter: its path in the tree, joined by dots.

Its values should be arrays: of the shape of ``param``, or of shape () for a counter. A checkpoint can hold those. An update may have
a method ``prepare(param, state)``, or ``prepare(param, state, name)``, that makes this state before the first call, so that a new program can load a checkpoint into it.
"""

_BLOCK = 1 << 15
"""Elements that are updated together on the host: so many that their temporary arrays stay in the cache, and cost no memory."""


@dataclass
class SGD:
    """Stochastic gradient descent, with momentum if asked for. A callable: ``sgd(param, grad, state)``.

    Parameters
    ----------
    lr
        The learning rate. It may be changed at any time, as may the others.
    momentum
        The share of the previous steps that goes into a step; 0 keeps no state.
    weight_decay
        The factor of the parameter that is added to its gradient.
    nesterov
        Whether the momentum is Nesterov's.

    Raises
    ------
    UsageError
        A value is negative, or Nesterov's momentum has no momentum.

    Notes
    -----
    As torch.optim.SGD with ``dampening=0``. Sutskever et al., "On the importance of initialization and momentum in deep learning",
    ICML 2013.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, "lr", "momentum", "weight_decay")
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov=True needs a momentum, such as momentum=0.9")

    def prepare(self, param: Array, state: dict[str, Any]) -> None:
        """Make the state that a first call would make.

        Parameters
        ----------
        param
            The parameter; it is not changed.
        state
            An empty dict, which is filled.
        """
        if self.momentum:
            state["momentum_buffer"] = namespace(param).zeros_like(param)

    def __call__(self, param: Array, grad: Array, state: dict[str, Any]) -> None:
        """Update ``param`` in place. ``grad`` has its shape and dtype; ``state`` is the same dict in each call."""
        if self.momentum and "momentum_buffer" not in state:
            self.prepare(param, state)
        for block in _blocks(param):
            p, g = param[block], grad[block]
            if self.weight_decay:
                g = g + p * self.weight_decay
            if self.momentum:
                momentum = state["momentum_buffer"][block]
                momentum *= self.momentum
                momentum += g
                g = g + momentum * self.momentum if self.nesterov else momentum
            p -= g * self.lr


@dataclass
class Adam:
    """Adam: steps scaled by running means of the gradient and of its square. A callable: ``adam(param, grad, state)``.

    Its state has the shape and dtype of the parameter (``exp_avg``, ``exp_avg_sq``), and counts the calls (``step``, shape ()).

    Parameters
    ----------
    lr
        The learning rate. It may be changed at any time, as may the others.
    betas
        How much of the two running means a step keeps.
    eps
        The number that is added to the root of the second mean, so that nothing is divided by 0.
    weight_decay
        The factor of the parameter that is added to its gradient.

    Raises
    ------
    UsageError
        A value is negative, or a beta is not below 1.

    Notes
    -----
    Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(self, "lr", "eps", "weight_decay")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"betas must be two numbers from 0 to below 1, such as (0.9, 0.999), not {self.betas!r}")

    def prepare(self, param: Array, state: dict[str, Any]) -> None:
        """Make the state that a first call would make.

        Parameters
        ----------
        param
            The parameter; it is not changed.
        state
            An empty dict, which is filled.
        """
        zeros_like = namespace(param).zeros_like
        state["step"] = np.zeros((), np.int64)
        state["exp_avg"], state["exp_avg_sq"] = zeros_like(param), zeros_like(param)

    def __call__(self, param: Array, grad: Array, state: dict[str, Any]) -> None:
        """Update ``param`` in place. ``grad`` has its shape and dtype; ``state`` is the same dict in each call."""
        if "step" not in state:
            self.prepare(param, state)
        state["step"] += 1
        step, sqrt = int(state["step"]), namespace(param).sqrt
        first, second = self.betas
        step_size = self.lr / (1 - first**step)
        root = math.sqrt(1 - second**step)
        for block in _blocks(param):
            p, g = param[block], self._decayed(param[block], grad[block])
            mean, square = state["exp_avg"][block], state["exp_avg_sq"][block]
            mean += (g - mean) * (1 - first)
            square *= second
            square += g * (1 - second) * g
            denominator = sqrt(square)
            denominator /= root
            denominator += self.eps
            p -= mean * step_size / denominator

    def _decayed(self, p: Array, g: Array) -> Array:
        """Return the gradient with weight decay."""
        return g + p * self.weight_decay if self.weight_decay else g


@dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay: the parameter shrinks by ``lr * weight_decay`` of itself, and its gradient knows nothing of it.

    The other parameters, and the errors, are those of `Adam`.

    Parameters
    ----------
    weight_decay
        The share of itself that the parameter loses in a step with a learning rate of 1.

    Notes
    -----
    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    weight_decay: float = 1e-2

    def _decayed(self, p: Array, g: Array) -> Array:
        p *= 1 - self.lr * self.weight_decay
        return g


@dataclass(frozen=True)
class ByName:
    """An update that is chosen for each parameter by its name: weight decay for some, other learning rates, parameters that stay as they are.

    >>> decayed, others = mp.AdamW(1e-3, weight_decay=0.1), mp.AdamW(1e-3, weight_decay=0.0)
    >>> opt = mp.ShardedOptimizer(mp.ByName(lambda name: others if name.endswith(".b") else decayed), params, group)

    Parameters
    ----------
    choose
        Returns the update of a parameter: `SGD`, `Adam`, `AdamW`, any function ``update(param, grad, state)``, or None if the parameter
        stays unchanged. It gets the name: the path in the tree, joined by dots, such as ``"layers.0.b"``; for an array at several
        places the first path. It must choose alike on all ranks.
    """

    choose: Callable[[str], Update | None]

    def prepare(self, param: Array, state: dict[str, Any], name: str) -> None:
        """Make the state that a first call would make, as the chosen update does; nothing if that has no ``prepare``.

        Parameters
        ----------
        param
            The parameter; it is not changed.
        state
            An empty dict, which is filled.
        name
            The name of the parameter.

        Raises
        ------
        UsageError
            The chosen object is not an update.
        """
        prepare = getattr(self._chosen(name), "prepare", None)
        if prepare is not None:
            prepare(param, state, **_named(prepare, name))

    def __call__(self, param: Array, grad: Array, state: dict[str, Any], name: str) -> None:
        """Update ``param`` in place, as the chosen update does."""
        update = self._chosen(name)
        if update is not None:
            update(param, grad, state, **_named(update, name))

    def _chosen(self, name: str) -> Update | None:
        update = self.choose(name)
        if not (update is None or callable(update)):
            raise UsageError(f"choose({name!r}) returned {update!r:.80}; expected an update such as mp.SGD(0.1), or None,")
        return update


def _named(function: Callable[..., Any], name: str) -> dict[str, str]:
    return {"name": name} if takes_name(function) else {}


def takes_name(function: Callable[..., Any]) -> bool:
    """Return whether an update, or its ``prepare``, has a parameter for the name that nothing is bound to yet."""
    if isinstance(function, partial) and "name" in function.keywords:
        return False
    try:
        return "name" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a callable of another language, without a signature
        return False


def _blocks(param: Array) -> Iterator[Any]:
    """Yield the index of part after part of an array."""
    if isinstance(param, np.ndarray) and param.ndim == 1:
        for start in range(0, param.size, _BLOCK):
            yield slice(start, start + _BLOCK)
    else:
        yield ...


def _check_positive(optimizer: object, *names: str) -> None:
    for name in names:
        value = getattr(optimizer, name)
        if not value >= 0:  # also false for a NaN
            raise UsageError(f"{name} must be 0 or more, not {value!r}")
