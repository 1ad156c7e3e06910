"""A model whose parameters are divided among the ranks, and gathered unit by unit when they are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from oneaccord import DeviceMesh, Group
from oneaccord.errors import UsageError
from oneaccord_parallel.agreement import checked_weight
from oneaccord_parallel.arrays import Array, like
from oneaccord_parallel.sharded.order import Order
from oneaccord_parallel.sharded.ranks import Strategy
from oneaccord_parallel.sharded.store import Store
from oneaccord_parallel.sharded.units import Part, Unit, check_dtypes, find

__all__ = ["Sharded"]


class Sharded(Store):
    """Parameters, gradients and the optimizer's state, divided among the ranks as ``strategy`` says. Every rank must make it.

    >>> store = mp.Sharded(params, group)
    >>> adam = mp.Adam(lr=1e-3)
    >>> with store.step(weight=len(batch)):
    ...     with store.unit("layer0") as w:
    ...         y = x @ w["kernel"]
    ...     store.reduce("layer0", {"kernel": x.T @ dy})
    >>> store.update(adam)

    All ranks must enter the same units, and reduce them, in the same order. A store is for one thread.

    Parameters
    ----------
    params
        A tree of floating-point arrays of one library: the same names, shapes and dtypes on all ranks. Other ranks than ``root`` need no
        memory for it: ``np.broadcast_to(np.float32(0), shape)`` will do. The store keeps copies of its own. The same array at several places,
        or several views of the same elements, are one parameter: it is kept once, and its gradients add up. (JAX arrays and read-only ones
        are values, and may be alike.)
    group
        The ranks; for `Hybrid` a mesh.
    strategy
        The data that are divided among the ranks. ``"full"``: parameters, gradients and the optimizer's state (FSDP, ZeRO-3). ``"grad"``: gradients
        and state (ZeRO-2). ``"none"``: nothing (DDP). `Hybrid`: as ``"full"`` along one axis of a mesh, repeated along another.
    units
        Prefixes of the names of parameters, such as ``["layers.0", "layers.1", "head"]``; a parameter belongs to the longest that fits. The arrays of
        a unit are gathered and reduced in one message for each dtype. By default the first component of each name.
    prefetch
        How many units are gathered in the background before they are entered, once a step has shown their order.
    compute_dtype
        The dtype in which parameters are gathered and shown, such as ``"bfloat16"``. By default their own. The shards, and the optimizer's
        arrays, keep theirs.
    reduce_dtype
        The dtype in which gradients are weighted and summed. By default that of the parameters, and float32 for those of 16 bits and fewer,
        whose weighted sums would soon overflow. The mean that an update gets has the dtype of the parameters in any case.
    reproducible
        Whether gradients are summed in one order, so that the bits of a training with an elementwise optimizer depend neither on the backend,
        nor on the units, nor on the strategy (except `Hybrid`, which sums in two stages). None: as the config says.
    root
        The rank whose parameters win. None: every rank takes its parts of its own, and nothing is sent; they must be alike.

    Attributes
    ----------
    memory
        The bytes of all buffers, by purpose.

    Raises
    ------
    UsageError
        The arguments are impossible, two parameters share some of their memory and are not the same, or the ranks differ: on every rank. The
        group stays usable.
    DTypeError
        A parameter is not an array of floating-point numbers, or a dtype is invalid.

    Notes
    -----
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020. Zhao et al., "PyTorch FSDP: Experiences
    on Scaling Fully Sharded Data Parallel", VLDB 2023. With n parameters in float32, Adam and N ranks, a rank holds 16 n / N bytes, and at most
    4 bytes for each parameter of 1 + ``prefetch`` units and for each gradient of one unit. The gradient of an array that belongs to several units
    is held from the first of them that is reduced to the last.

    After a failure of the group, the parameters of ``"full"`` and ``"none"`` are those before or after an update, never in between. With
    ``"grad"``, a failure while they are gathered leaves them so on this rank's shard alone, and every use of the others raises the error.
    """

    def __init__(
        self,
        params: Any,
        group: Group | DeviceMesh,
        strategy: Strategy = "full",
        *,
        units: Sequence[str] | None = None,
        prefetch: int = 1,
        compute_dtype: str | None = None,
        reduce_dtype: str | None = None,
        reproducible: bool | None = True,
        root: int | None = 0,
    ) -> None:
        if prefetch < 0:
            raise UsageError(f"prefetch must be a number of units, 0 or more, not {prefetch!r}")
        check_dtypes(compute_dtype, reduce_dtype)
        self._compute_dtype = compute_dtype
        self._orders = {"step": Order(prefetch), "evaluation": Order(prefetch)}
        self._reduced: set[str] = set()
        self._held: dict[Part, Array] = {}  # the gradients of parts that belong to more units, which are not reduced yet
        self._lacking: Counter[Part] = Counter()  # how many those are
        self._present: dict[str, Unit] = {}  # the units that are there, or on their way
        options = {"prefetch": prefetch, "compute_dtype": compute_dtype}
        super().__init__(params, group, strategy, units, root, reduce_dtype, reproducible, options)

    @property
    def units(self) -> list[str]:
        """The names of the units."""
        return list(self._units)

    @contextmanager
    def step(self, weight: float = 1.0) -> Iterator[Self]:
        """Run a training step: within it, enter units and reduce their gradients; afterwards, `update`.

        At its end the ranks compare their work, in one small message. Gradients of a step before are dropped, unless that was `paused`.

        Parameters
        ----------
        weight
            The weight of this rank's gradients, usually the number of its samples: the mean is sum(weight * gradient) / sum(weight). 0 on a rank
            without data: its gradients count as zeros.

        Raises
        ------
        UsageError
            Another step is under way, or the weight is invalid. At the end: the ranks entered or reduced different units, or all weights are 0;
            on every rank. The gradients are dropped, nothing else has changed, and the group stays usable.
        """
        with self._ordered("step", checked_weight(weight)):
            self._reduced = set()
            self._lacking = Counter(part for unit in self._units.values() for part in unit.parts)
            yield self
            self._settle()
            while self._held:  # some of their units were not reduced
                self._reduce(*self._held.popitem())

    @contextmanager
    def evaluation(self) -> Iterator[Self]:
        """Enter units without a training step: gradients stay as they are, and the order of training steps is not forgotten.

        Raises
        ------
        UsageError
            A step is under way. At the end: the ranks entered different units; on every rank.
        """
        with self._ordered("evaluation", None):
            yield self

    @contextmanager
    def _ordered(self, what: str, weight: float | None) -> Iterator[None]:
        with self._step(what, weight):
            self._orders[what].begin()
            yield
        self._orders[what].end()

    @contextmanager
    def unit(self, name: str) -> Iterator[Any]:
        """Gather the parameters of a unit, and give their memory back at the end.

        A unit may be entered again, also within itself; it is gathered once until its last block ends. The yielded tree is emptied at
        the end. An array that was taken out of it keeps the unit's memory as long as it exists.

        Parameters
        ----------
        name
            A name of `units`.

        Yields
        ------
        tree
            The parameters, not to be written to: the subtree of the unit, or a dict of names within the unit if it is no subtree. Arrays of
            the library of the given ones; JAX arrays are copies.

        Raises
        ------
        UsageError
            There is no such unit, or no step is under way.
        """
        unit = find(self._units, name)
        if self._running is None:
            raise UsageError(
                f"unit({name!r}) was entered outside of a step: use `with store.step():` or `with store.evaluation():`"
            )
        order = self._orders[self._running]
        unit.users += 1
        try:
            if unit.users == 1:
                self._enter(unit, order)
            assert unit.leaves is not None
            tree = unit.tree(unit.leaves)
            try:
                yield tree
            finally:
                _clear(tree)
                del tree
        finally:
            unit.users = max(unit.users - 1, 0)  # it is 0 already if the step has ended before
            if unit.users == 0:
                self._trim(order.upcoming())

    def reduce(self, name: str, gradients: Any) -> None:
        """Begin to sum the gradients of a unit over all ranks, in the background.

        It first waits for the sums of the unit before, so that one unit's gradients at most are held twice: here, and by the program.

        Parameters
        ----------
        name
            A name of `units`. Each unit is reduced at most once in a step. A unit that no rank reduces is not updated.
        gradients
            A tree like that which `unit` yields, of this rank's mean gradients: of the dtype of the parameters or of ``compute_dtype``. They are
            copied before this returns. None, in place of the tree, a subtree or a leaf: this rank has no gradient there, which counts as
            zeros if another rank has one. A parameter that has none on any rank, such as a frozen one, is not updated. The gradients of an array
            at several places add up, in the order in which they come. In one call, the same memory at several of its places is the
            sum already, and counts once; see `ShardedOptimizer.step`.

        Raises
        ------
        UsageError
            There is no such unit, it has been reduced already, names, shapes or dtypes differ from those of the unit, or no training step is
            under way. Nothing has been sent.
        """
        self._within("reduce()", "step")
        unit = find(self._units, name)
        if name in self._reduced:
            raise UsageError(
                f"the unit {name!r} was reduced already in this step: add up its gradients first, and reduce it once"
            )
        given = {} if gradients is None else unit.gradients(gradients, [self._compute_dtype])
        self._settle()
        self._reduced.add(name)
        self._log.append(f"reduced the unit {name!r}")
        for part in unit.parts:
            flat = self._pack(part, given, self._held.pop(part, None))
            self._lacking[part] -= 1
            if self._lacking[part]:
                self._held[part] = flat  # its places are summed here, and then over the ranks, for any units
            else:
                self._reduce(part, flat)

    # Gathering

    def _enter(self, unit: Unit, order: Order) -> None:
        """Let a unit be there, and let those that come next be on their way."""
        window = order.enter(unit.name)
        if not self._ranks.keeps:
            self._log.append(f"entered the unit {unit.name!r}")
        self._trim(window)
        for name in window:
            each = self._present[name] = self._units[name]
            if each.leaves is None:
                for part in each.parts:
                    self._gather(part)
        if unit.leaves is None:
            unit.leaves = self._show(unit)

    def _gather(self, part: Part) -> None:
        """Begin to gather a part, unless it is there or on its way."""
        if part.gathered is not None:
            return
        if part.whole is None:
            dtype = self._compute_dtype or part.layout.dtype
            part.gathered = self._empty(part, "gathered", part.layout.padded_size, dtype)
            part.pending = self._all_gather(part, part.gathered)
        elif self._compute_dtype not in (None, part.layout.dtype):
            self._arrive(part)
            part.gathered = self._empty(part, "gathered", part.layout.padded_size, self._compute_dtype)
            part.gathered[...] = part.whole

    def _show(self, unit: Unit) -> dict[str, Array]:
        """Return the leaves of a unit, by full name; from now on they alone hold the memory."""
        leaves: dict[str, Array] = {}
        for part in unit.parts:
            self._gather(part)  # it is released if another unit that has it as well was entered in between
            self._arrive(part)
            flat = part.whole if part.gathered is None else part.gathered
            for name, view in part.layout.views(flat).items():
                leaf = like(view, part.template)
                if leaf is not view:
                    self.memory.adopt("gathered", leaf)
                elif isinstance(leaf, np.ndarray):
                    leaf.flags.writeable = False
                leaves[name] = leaf
            part.gathered = None
        return leaves

    def _trim(self, window: Sequence[str]) -> None:
        """Release the units that are there or on their way, and neither in use nor wanted."""
        for unit in list(self._present.values()):
            if unit.users == 0 and unit.name not in window:
                del self._present[unit.name]
                unit.leaves = None
                for part in unit.parts:
                    part.gathered = None
                    if part.whole is None:
                        part.pending = None

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._held.clear()

    def _release(self) -> None:
        for unit in self._units.values():
            unit.users = 0
        self._trim(())


def _clear(tree: Any) -> None:
    """Empty the dicts and lists of a tree, so that nothing in it keeps memory."""
    if isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            _clear(child)
    if isinstance(tree, dict | list):
        tree.clear()
