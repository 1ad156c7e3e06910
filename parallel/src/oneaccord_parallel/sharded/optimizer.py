"""An optimizer of which each rank keeps a part: the parameters are whole everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

from oneaccord import Group
from oneaccord.errors import UsageError
from oneaccord_parallel import trees
from oneaccord_parallel.agreement import checked_weight
from oneaccord_parallel.arrays import Array, like, readable
from oneaccord_parallel.optimizers import Update
from oneaccord_parallel.overlaps import is_repeated
from oneaccord_parallel.scaling import add_scaled, copy_scaled
from oneaccord_parallel.sharded.store import Store
from oneaccord_parallel.sharded.units import Part, Unit, check, check_dtypes

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(Store):
    """An optimizer whose state is divided among the ranks, for parameters that every rank holds whole. Every rank must make it.

    >>> opt = mp.ShardedOptimizer(mp.Adam(lr=1e-3), params, group)
    >>> params = opt.params
    >>> opt.step(gradients(params, batch), weight=len(batch))

    Parameters
    ----------
    update
        `SGD`, `Adam`, `AdamW`, `ByName`, or any function ``update(param, grad, state)`` that changes ``param`` in place; see `Sharded.update`.
    params
        A tree of floating-point arrays of one library: the same names, shapes and dtypes on all ranks. They are copied into `params`.
        The same array at several places is one parameter; see `Sharded`.
    group
        The ranks.
    stage
        1: gradients are whole until they are reduced at the end of the step (ZeRO-1). 2: a unit is reduced as soon as it is complete, and
        each rank keeps its part of the sum (ZeRO-2).
    units
        Prefixes of the names of parameters. The arrays of a unit are reduced and gathered in one message for each dtype. By default the first
        component of each name.
    reduce_dtype
        The dtype in which gradients are weighted and summed; see `Sharded`.
    reproducible
        Whether gradients are summed in one order; see `Sharded`.
    root
        The rank whose parameters win; None: every rank keeps its own, which must be alike.

    Attributes
    ----------
    memory
        The bytes of all buffers, by purpose.

    Raises
    ------
    UsageError
        The arguments are impossible, or differ between ranks: on every rank. The group stays usable.
    DTypeError
        A parameter is no array of floating-point numbers.

    Notes
    -----
    With n parameters in float32, Adam and N ranks, a rank holds 8 n + 8 n / N bytes in stage 1, and 4 n + 12 n / N in stage 2 with one unit's
    gradients. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
    """

    def __init__(
        self,
        update: Update,
        params: Any,
        group: Group,
        stage: Literal[1, 2] = 1,
        *,
        units: Sequence[str] | None = None,
        reduce_dtype: str | None = None,
        reproducible: bool | None = True,
        root: int | None = 0,
    ) -> None:
        if stage not in (1, 2):
            raise UsageError(f"stage must be 1 or 2, not {stage!r}; for 3 there is mp.Sharded")
        self._update_with = update
        self._stage = stage
        self._flat: dict[Part, Array] = {}
        self._given: set[str] = set()
        self._missing: dict[Part, int] = {}  # of how many gradients a backward pass has not made ready yet
        self._filled: set[str] = set()
        check_dtypes(reduce_dtype)
        super().__init__(params, group, "grad", units, root, reduce_dtype, reproducible, {"stage": stage})
        homes = {slot.name: (unit, part, slot) for unit, part in self._pairs() for slot in part.layout.slots}
        names = [name for unit in self._units.values() for name in unit.relative]
        self._homes = {name: homes[self._tied.get(name, name)] for name in names}

    def _pairs(self) -> Iterator[tuple[Unit, Part]]:
        """Yield each part, with the first unit that has it."""
        seen: set[Part] = set()
        for unit in self._units.values():
            for part in unit.parts:
                if part not in seen:
                    seen.add(part)
                    yield unit, part

    @property
    def params(self) -> Any:
        """The parameters, as a tree like the given one: views of the arrays that are updated in place.

        Earlier views have the new values when `step` returns, and after `update` when this property is read again. JAX arrays are
        copies, so read it again after either. After `state`, into which a checkpoint may have been written, they are gathered once more: then every
        rank must read this property.
        """
        self._refresh()
        leaves: dict[str, Array] = {}
        for part in self._parts():
            self._arrive(part)
            leaves |= {name: like(view, part.template) for name, view in part.layout.views(part.whole).items()}
        return self._tree(leaves)

    def step(self, gradients: Any, weight: float = 1.0) -> None:
        """Reduce gradients, update this rank's part of the parameters, and gather them. Within `paused`, only add the gradients up.

        Parameters
        ----------
        gradients
            A tree like that of the parameters, of this rank's mean gradients. None, in place of the tree, a subtree or a leaf: this rank
            has no gradient there, which counts as zeros if another rank has one. A parameter that has none on any rank, such as a frozen one,
            is not updated. The gradients of an array at several places add up, in the order in which they come. The same memory at
            several of its places, such as the ``.grad`` that the names of a tied parameter of torch have in common, is the sum already, and
            counts once. Arrays of JAX and read-only ones are values, which may be alike, and count each.
        weight
            Their weight, usually the number of samples: the mean is sum(weight * gradient) / sum(weight). It may be 0.

        Raises
        ------
        UsageError
            Names, shapes or dtypes differ from those of the parameters. Nothing has been sent. Or all weights are 0, on every rank; the
            parameters are unchanged.
        """
        given, missing, unknown = trees.partly_named(gradients, self._homes, lambda: self._tree(dict.fromkeys(self._homes, 0)))
        if missing or unknown:
            raise UsageError(
                f"the gradients must have the names of the parameters: missing are {missing or 'none'}, unknown are {unknown or 'none'}; "
                "give None for a parameter without a gradient: one that has none on any rank is not updated"
            )
        places: dict[str, list[Array]] = {}
        for name, gradient in [*given.items()]:
            self._check(name, gradient)
            others = places.setdefault(self._tied.get(name, name), [])
            if is_repeated(gradient, others):
                given[name] = None
            others.append(gradient)
        with self.backward(weight):
            for unit in self._units.values():
                for name in unit.relative:
                    self.ready(name, given.get(name))
        if not self._is_paused:
            self.update()
            for part in self._parts():
                self._arrive(part)  # the holder of `params` looks at them next

    @contextmanager
    def backward(self, weight: float = 1.0) -> Iterator[Self]:
        """Take gradients one by one as a backward pass makes them; afterwards, `update`.

        >>> with opt.backward(weight=len(batch)):
        ...     opt.ready("w2", g2)
        ...     opt.ready("w1", g1)
        >>> opt.update()

        All ranks must make the same gradients ready in the same order. A parameter whose gradient is not made ready is not updated.

        Parameters
        ----------
        weight
            As for `step`.

        Raises
        ------
        UsageError
            Another backward pass is under way, or the weight is invalid. At the end: the ranks made different gradients ready, or all weights are
            0; on every rank. The gradients are dropped, and the parameters are unchanged.
        """
        with self._step("backward", checked_weight(weight)):
            self._given = set()
            self._missing = Counter(part for _, part, _ in self._homes.values())
            yield self
            for unit, part in self._pairs():
                if part in self._flat and (self._stage == 2 or not self._is_paused):
                    self._begin(unit, part)

    def ready(self, name: str, gradient: Array | None) -> None:
        """Take the gradient of one parameter. In stage 2, its unit is reduced in the background once it is complete.

        Parameters
        ----------
        name
            The name of the parameter: its path in the tree, joined by dots.
        gradient
            This rank's mean gradient, of the shape and dtype of the parameter. It is copied before this returns. None: this rank has none; see
            `step`. The gradients of an array at several places add up, also if they come in the same memory, which a program may
            have filled again: give the ``.grad`` of a tied parameter of torch under one of its names.

        Raises
        ------
        UsageError
            There is no such parameter, its gradient was given already, shape or dtype differ, or no backward pass is under way. Nothing has
            been sent.
        """
        self._within("ready()", "backward")
        self._check(name, gradient)
        if name in self._given:
            raise UsageError(f"the gradient of {name!r} was already given in this backward pass: add up its gradients first")
        unit, part, slot = self._homes[name]
        self._given.add(name)
        self._missing[part] -= 1
        if part not in self._flat:
            if self._stage == 2:
                self._settle()
            self._flat[part] = self._empty_sum(part)
            self._flat[part][...] = 0
        self._log.append(f"made the gradient of {name!r} ready")
        if gradient is not None and self._weight != 0:
            target = slot.view(self._flat[part])
            if slot.name in self._filled:
                add_scaled(target, readable(gradient), self._weight)
            else:
                copy_scaled(target, readable(gradient), self._weight)
                self._filled.add(slot.name)
            self._mine.add(slot.name)
        if self._stage == 2 and not self._missing[part]:
            self._begin(unit, part)

    def update(self, optimizer: Update | None = None) -> None:
        """Update this rank's part of the parameters, and begin to gather them; see `Sharded.update`. Reading `params` waits for them.

        Parameters
        ----------
        optimizer
            By default that of the constructor.

        Raises
        ------
        UsageError
            There are no gradients. Nothing has changed.
        """
        super().update(optimizer or self._update_with)

    def state(self, optimizer: Update | None = None) -> dict[str, Any]:
        """Return the content of a checkpoint; see `Sharded.state`. The state of this optimizer is there from the beginning, if it can be prepared.

        Parameters
        ----------
        optimizer
            None for the update that this was made with.
        """
        own = self._update_with if hasattr(self._update_with, "prepare") else None
        return super().state(optimizer or own)

    def _begin(self, unit: Unit, part: Part) -> None:
        """Begin to reduce a unit."""
        self._settle()
        flat = self._flat.pop(part)
        self._filled -= {slot.name for slot in part.layout.slots}
        self._log.append(f"reduced the unit {unit.name!r}")
        self._reduce(part, flat)

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._flat.clear()
        self._filled.clear()

    def _check(self, name: str, gradient: Array | None) -> None:
        if name not in self._homes:
            raise UsageError(f"there is no parameter {name!r}: the parameters are {sorted(self._homes)}")
        if gradient is not None:
            _, part, slot = self._homes[name]
            check(name, gradient, slot.shape, {part.layout.dtype})
