"""The common part of a sharded model and a sharded optimizer: units, the sums of their gradients, updates and state."""

from __future__ import annotations

import hashlib
import itertools
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np

from oneaccord import DeviceMesh, Group, Work
from oneaccord.errors import OneAccordError, UsageError
from oneaccord_parallel import trees
from oneaccord_parallel.arrays import Array, Memory, dtype_of, itemsize, like, readable, shape_of, summed_in
from oneaccord_parallel.clip import clip_by_global_norm
from oneaccord_parallel.layout import Slot
from oneaccord_parallel.optimizers import Update, takes_name
from oneaccord_parallel.overlaps import ties
from oneaccord_parallel.scaling import add_scaled, copy_divided, copy_scaled
from oneaccord_parallel.sharded.ranks import Ranks, Strategy
from oneaccord_parallel.sharded.units import Part, Unit, checked, divide
from oneaccord_parallel.sharded_arrays import ShardedArray

__all__ = ["Store"]


class _Sum(NamedTuple):
    """A sum of gradients under way: ``flat`` is the input, and ``target`` the memory for this rank's part."""

    part: Part
    flat: Array
    target: Array
    work: Work[Array]


class Store:
    """Parameters in units, of each of which every rank has a shard; not for users: see `Sharded` and `ShardedOptimizer`.

    Attributes
    ----------
    memory
        Makes the buffers, and counts their bytes: ``"parameters"``, ``"gradients"`` (the shards), ``"unit gradients"`` (those that are
        summed), ``"gathered"`` and ``"state"`` (of the optimizer).
    """

    def __init__(
        self,
        params: Any,
        group: Group | DeviceMesh,
        strategy: Strategy,
        units: Sequence[str] | None,
        root: int | None,
        reduce_dtype: str | None,
        reproducible: bool | None,
        options: Mapping[str, object],
    ) -> None:
        self._ranks = Ranks(group, strategy, root)
        self.memory: Memory = self._ranks.memory
        self._units: dict[str, Unit] = {}
        self._reduce_dtype = reduce_dtype
        self._reproducible = reproducible
        lines = [
            f"strategy={strategy!r}, root={root}, reduce_dtype={reduce_dtype}, reproducible={reproducible}, {dict(options)}"
        ]
        failure: OneAccordError | None = None
        found: list[Unit] = []
        leaves: dict[str, Array] = {}
        tied: dict[str, str] = {}
        try:
            leaves, self._spec = checked(params, type(self).__name__)
            if root is None or self._ranks.is_root:  # the others' values do not matter, and may all be one
                tied = ties(leaves)
        except OneAccordError as error:
            failure = error
        told = self._ranks.of_root(tied)
        self._tied = {name: first for name, first in told.items() if name in leaves and first in leaves}
        try:
            if failure is not None:
                raise failure
            found = divide(leaves, self._spec, units, self._ranks.parts, self._tied)
            self._units = {unit.name: unit for unit in found}
            lines += [
                f"unit {unit.name!r}: {slot.name!r} {part.layout.dtype}{list(slot.shape)}"
                for unit in found
                for part in unit.parts
                for slot in part.layout.slots
            ]
            lines += [
                f"{name!r} {dtype_of(leaves[name])}{list(shape_of(leaves[name]))} is the array {first!r}"
                for name, first in self._tied.items()
            ]
        except OneAccordError as error:
            failure = error
            lines = [f"refused its arguments: {error}"]
        self._ranks.agree(lines, failure, "every rank must give the same parameters, units and options")
        self._log: list[str] = []
        self._running: str | None = None
        self._is_paused = False
        self._carries = False
        self._weight, self._total = 1.0, 0.0
        self._is_mean = self._is_stale = False
        self._sums: list[_Sum] = []
        self._second: list[_Sum] = []
        self._names = [slot.name for part in self._parts() for slot in part.layout.slots]
        self._mine: set[str] = set()  # the parameters of which this rank has had a gradient in this step
        self._used: set[str] = set()  # and those of which any rank has had one, since the last update
        for part in self._parts():
            self._fill(part, leaves)

    def _fill(self, part: Part, leaves: Mapping[str, Array]) -> None:
        """Make the buffers of a part, and fill them with the root's values."""
        ranks, layout = self._ranks, part.layout
        mine = layout.shard(ranks.part)
        whole = None
        if ranks.keeps:
            part.whole = whole = self._empty(part, "parameters", layout.padded_size)
            part.shard = whole[mine]
        else:
            part.shard = self._empty(part, "parameters", layout.shard_size)
        if ranks.root_part is None:
            part.shard[...] = 0
            for slot, first, own in layout.pieces(ranks.part):
                part.shard[own] = readable(leaves[slot.name]).reshape(-1)[first : first + own.stop - own.start]
            if whole is not None:
                layout.pack(leaves, whole)
            return
        if ranks.is_root:
            if whole is None:
                whole = self._empty(part, "gathered", layout.padded_size)
            layout.pack(leaves, whole)
        ranks.spread(whole, part.shard)

    def _empty(self, part: Part, purpose: str, size: int, dtype: str | None = None) -> Array:
        return self.memory.empty(purpose, size, dtype or part.layout.dtype, part.template)

    def __repr__(self) -> str:
        sizes = sum(part.layout.size for part in self._parts())
        return f"<{type(self).__name__} of {sizes:,} parameters in {len(self._units)} units, shard {self._ranks.part} of {self._ranks.parts}>"

    def _parts(self) -> Iterator[Part]:
        yield from dict.fromkeys(part for unit in self._units.values() for part in unit.parts)

    # A step: gradients are summed unit by unit, and compared at its end

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the steps within add up their gradients for the next step, or for an update.

        k steps of which the first k - 1 are paused give the gradient of one step over all their micro-batches: the sum of all weighted
        gradients, divided by the sum of all weights.

        Raises
        ------
        UsageError
            A step is under way.
        """
        self._outside("paused()")
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def _step(self, what: str, weight: float | None) -> Iterator[None]:
        """Run a step: with a weight, one that sums gradients."""
        self._outside(f"{what}()")
        if weight is not None:
            self._weight = weight
            if self._is_mean or not self._carries:
                self._drop_gradients()
        self._log.append(f"began {what}(){' in paused()' if self._is_paused else ''}")
        self._running = what
        self._mine = set()
        try:
            self._refresh()
            yield
            self._complete()
            self._compare(None if weight is None else self._weight)
        except BaseException:
            if weight is not None:
                self._drop_gradients()
            self._log.clear()
            raise
        finally:
            self._running = None
            self._release()
        if weight is not None:
            self._carries = self._is_paused

    def _outside(self, call: str) -> None:
        if self._running:
            raise UsageError(f"{call} was called within {self._running}(); end the step first")

    def _within(self, call: str, what: str) -> None:
        if self._running != what:
            place = f"within {self._running}()" if self._running else "outside of it"
            raise UsageError(f"{call} belongs into `with ....{what}():`, and was called {place}")

    def _drop_gradients(self) -> None:
        self._sums, self._second = [], []
        self._total, self._is_mean, self._carries = 0.0, False, False
        self._used = set()
        for part in self._parts():
            part.gradient = None

    def _release(self) -> None:
        """Release the data of a single step."""

    def _refresh(self) -> None:
        """Begin to gather the parameters on ranks that hold them whole, if shards may have changed since."""
        if self._is_stale and self._ranks.keeps and self._ranks.shard is not None:
            for part in self._parts():
                part.pending = self._all_gather(part, part.whole)
        self._is_stale = False

    def _all_gather(self, part: Part, out: Array) -> Work[Array]:
        """Begin to gather a part, in the dtype of ``out``."""
        source = part.shard
        if part.whole is not None or dtype_of(out) != part.layout.dtype:  # the shard lies within ``out``, or has another dtype
            source = self._empty(part, "gathered", part.layout.shard_size, dtype_of(out))
            source[...] = part.shard
        assert self._ranks.shard is not None
        return self._ranks.shard.all_gather_async(source, out=out)

    def _pack(self, part: Part, gradients: Mapping[str, Sequence[Array]], flat: Array | None) -> Array:
        """Add weighted gradients to a flat buffer, by default a new one; there are zeros if this rank has none."""
        is_new = flat is None
        if is_new:
            flat = self._empty_sum(part)
            flat[part.layout.size :] = 0
        for slot in part.layout.slots:
            view = slot.view(flat)
            given = gradients.get(slot.name, ()) if self._weight else ()  # 0 times what is infinite is no zero
            if is_new and not given:
                view[...] = 0
            for gradient in given:
                (add_scaled if slot.name in self._mine else copy_scaled)(view, readable(gradient), self._weight)
                self._mine.add(slot.name)
        return flat

    def _empty_sum(self, part: Part) -> Array:
        """Return a buffer for the weighted gradients of a part, in the dtype in which they are summed."""
        return self._empty(part, "unit gradients", part.layout.padded_size, summed_in(part.layout.dtype, self._reduce_dtype))

    def _reduce(self, part: Part, flat: Array) -> None:
        """Begin to sum a flat buffer over all ranks."""
        ranks = self._ranks
        if ranks.shard is None:
            assert ranks.replicate is not None
            work = ranks.replicate.all_reduce_async(flat, out=flat, reproducible=self._reproducible)
            self._sums.append(_Sum(part, flat, flat, work))
            return
        target = self._empty(part, "gradients", part.layout.shard_size, dtype_of(flat))
        work = ranks.shard.reduce_scatter_async(flat, out=target, reproducible=self._reproducible)
        self._sums.append(_Sum(part, flat, target, work))

    def _settle(self) -> None:
        """Wait for the sums under way, so that their inputs are given back; the sum over ``replicate`` continues in the background."""
        done, self._sums = self._sums, []
        ranks = self._ranks
        for part, _, target, work in done:
            work.wait()
            if ranks.shard is None or ranks.replicate is None:
                self._add(part, target)
            else:
                second = ranks.replicate.all_reduce_async(target, out=target, reproducible=self._reproducible)
                self._second.append(_Sum(part, target, target, second))

    def _complete(self) -> None:
        """Wait for all sums."""
        self._settle()
        done, self._second = self._second, []
        for part, _, target, work in done:
            work.wait()
            self._add(part, target)

    def _add(self, part: Part, total: Array) -> None:
        if part.gradient is not None:
            add_scaled(part.gradient, total, 1)
        elif itemsize(dtype_of(total)) >= itemsize(part.layout.dtype):
            part.gradient = total  # if the parameters have a shorter dtype, only the mean is sure to fit
        else:
            part.gradient = self._empty(part, "gradients", part.layout.shard_size)
            part.gradient[...] = total

    def _compare(self, weight: float | None) -> None:
        """Compare the work of the ranks, add up their weights, and find out which parameters have a gradient; one small message.

        Raises
        ------
        UsageError
            They did different things, or no rank has a weight; on every rank.
        """
        log, self._log = self._log, []
        digest = hashlib.blake2b("\n".join(log).encode(), digest_size=16).digest()
        has = np.packbits(np.array([name in self._mine for name in self._names]))
        records = self._ranks.gather(struct.pack("=d", weight or 0.0) + digest + has.tobytes())
        if len({record[8:24] for record in records}) > 1:
            self._ranks.agree(log, None, "the ranks did different things in this step, and its gradients are dropped")
        if weight is None:
            return
        for record in records:
            has |= np.frombuffer(record, np.uint8)[24:]
        self._used.update(itertools.compress(self._names, np.unpackbits(has).tolist()))
        self._total += self._ranks.total([struct.unpack("=d", record[:8])[0] for record in records])
        if not self._is_paused and self._total == 0:
            self._refuse_total()

    def _refuse_total(self) -> NoReturn:
        raise UsageError(
            "the weights of all ranks are 0, so there is no mean gradient: skip the step on all ranks, or give a weight"
        )

    # Updates

    def shards(self) -> list[tuple[Array, Array]]:
        """Return this rank's flat shards: parameters, and the mean gradient over all ranks, for each dtype of each unit.

        Both may be written to. Gradients that no rank has given are left out: a whole unit, or parameters of one, which then gives several
        pairs. A shard has no padding, and may be empty.

        >>> for p, g in store.shards():
        ...     p -= 0.1 * g

        Raises
        ------
        UsageError
            There are no gradients: no step has ended since the last `update`.
        """
        found: list[tuple[Array, Array]] = []
        for part in self._ready("shards()"):
            run: slice | None = None
            for slot, _, own in part.layout.pieces(self._ranks.part):
                if slot.name in self._used:
                    run = own if run is None else slice(run.start, own.stop)
                elif run is not None:
                    found.append((part.shard[run], part.gradient[run]))
                    run = None
            if run is not None:
                found.append((part.shard[run], part.gradient[run]))
        return found

    def clip_by_global_norm(
        self,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        timeout_s: float | None = None,
    ) -> float:
        """Scale the mean gradients so that their norm over all parameters is at most ``max_norm``, before `update`. Every rank must call it.

        It counts each element once, for every strategy, by `mp.clip_by_global_norm`.

        Parameters
        ----------
        max_norm, norm_type, error_if_nonfinite, timeout_s
            As for `mp.clip_by_global_norm`.

        Returns
        -------
        float
            The norm before clipping, the same on all ranks.

        Raises
        ------
        UsageError
            There are no gradients, or as `mp.clip_by_global_norm`.
        """
        gradients = [gradient for _, gradient in self.shards()]
        shard = self._ranks.shard
        placement = "replicated" if shard is None else "sharded"
        return clip_by_global_norm(
            gradients,
            max_norm,
            shard,
            placement,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
            timeout_s=timeout_s,
        )[1]

    def update(self, optimizer: Update) -> None:
        """Update this rank's shards by their mean gradient, and give the gradients up.

        It does not communicate, except that with ``strategy="grad"`` the ranks begin to gather the parameters.

        Parameters
        ----------
        optimizer
            `SGD`, `Adam`, `AdamW`, `ByName`, or any function ``update(param, grad, state)``, or ``update(param, grad, state, name)``, that
            changes ``param`` in place. It is called for each parameter that has a gradient on any rank, with flat arrays of the elements that
            this rank has, which may be none, and a dict that is kept for the next call; the others stay as they are. The name is the path in
            the tree, joined by dots, such as ``"layers.0.w"``. It must work element by element if all strategies and numbers of ranks shall
            give the same result.

        Raises
        ------
        UsageError
            There are no gradients: no step has ended since the last update. Nothing has changed.
        Exception
            The exception of ``optimizer``; the parameters before have been updated then.
        """
        ready = self._ready("update()")
        is_named = takes_name(optimizer)
        for part in ready:
            for slot, _, own in part.layout.pieces(self._ranks.part):
                if slot.name in self._used:
                    state = part.states.setdefault(slot.name, {})
                    optimizer(part.shard[own], part.gradient[own], state, **({"name": slot.name} if is_named else {}))
            self._count(part)
            part.gradient = None
        self._drop_gradients()
        self._log.append("updated")
        self._refresh()

    def _ready(self, call: str) -> list[Part]:
        """Return the parts that have a gradient, which is the mean from now on."""
        self._outside(call)
        if self._total == 0:
            if self._carries:
                self._refuse_total()
            raise UsageError(f"{call} found no gradients: no step has ended since the last update")
        ready = [
            part
            for part in self._parts()
            if part.gradient is not None and any(slot.name in self._used for slot in part.layout.slots)
        ]
        if not ready:
            raise UsageError(f"{call} found no gradients: no rank has given any in the last step")
        if not self._is_mean:
            for part in ready:
                total = part.gradient
                if dtype_of(total) != part.layout.dtype:
                    part.gradient = self._empty(part, "gradients", part.layout.shard_size)
                copy_divided(part.gradient, total, self._total)
        self._is_mean = self._is_stale = True
        return ready

    def _count(self, part: Part) -> None:
        """Count the arrays of an optimizer's state; counters of shape () are left out."""
        for name, state in part.states.items():
            for key, value in state.items():
                known = part.counted.get((name, key))
                if getattr(value, "shape", ()) != () and (known is None or known() is not value):
                    self.memory.adopt("state", value)
                    part.counted[name, key] = weakref.ref(value)

    # The whole, and the content of a checkpoint

    def full(self) -> Any:
        """Return all parameters whole, as a tree like the given one; every rank must call it, and needs the memory.

        Raises
        ------
        UsageError
            A step is under way.
        """
        self._outside("full()")
        self._refresh()
        self._log.append("full()")
        leaves: dict[str, Array] = {}
        for part in self._parts():
            if part.whole is None:
                flat = self._empty(part, "gathered", part.layout.padded_size)
                self._all_gather(part, flat).wait()
            else:
                self._arrive(part)
                flat = self._empty(part, "gathered", part.layout.padded_size)
                flat[...] = part.whole
            leaves |= {name: like(view, part.template) for name, view in part.layout.views(flat).items()}
        return self._tree(leaves)

    def _arrive(self, part: Part) -> None:
        """Wait until the parameters that this rank holds whole are those of all ranks."""
        if part.pending is not None:
            part.pending.wait()
            part.pending = None

    def _tree(self, leaves: Mapping[str, Any]) -> Any:
        """Return a tree like the given one, with the value of each parameter by its first name."""
        names = [".".join(map(str, path)) for path in self._spec.paths()]
        return trees.rebuild(self._spec, {name: leaves[self._tied.get(name, name)] for name in names})

    def state(self, optimizer: Update | None = None) -> dict[str, Any]:
        """Return the content of a checkpoint, as a tree of `ShardedArray` leaves that are views: write into them to load one.

        A checkpoint of it can be loaded by another number of ranks, with other units and another strategy. It sends nothing, but waits for the
        parameters of the last `update`. Every rank must call it.

        Parameters
        ----------
        optimizer
            The optimizer whose state is to be there although it has not been called yet: give it before you load. It needs a method
            ``prepare``, which those of this package have.

        Returns
        -------
        dict
            ``"params"``: a tree like the given one. ``"state"``: for each parameter by name, the entries of the optimizer's state; of an
            array at several places by the first name.

        Raises
        ------
        UsageError
            A step is under way, ``optimizer`` can not prepare its state, or that holds something that is no array of the shape that its
            ``param`` had or of shape ().
        """
        self._outside("state()")
        self._is_stale = True
        params: dict[str, ShardedArray] = {}
        states: dict[str, dict[str, ShardedArray]] = {}
        for part in self._parts():
            self._arrive(part)  # or it would overwrite the content of a checkpoint
            for slot, first, own in part.layout.pieces(self._ranks.part):
                piece = part.shard[own]
                params[slot.name] = _piece(slot, first, piece)
                state = part.states.setdefault(slot.name, {})
                if optimizer is not None and not state:
                    self._prepare(optimizer, piece, state, slot.name)
                # A checkpoint is loaded into them, and NumPy's numbers do not change.
                state.update({key: np.array(value) for key, value in state.items() if isinstance(value, np.generic)})
                for key, value in state.items():
                    states.setdefault(slot.name, {})[key] = _entry(slot, first, piece, key, value)
            self._count(part)
        return {"params": self._tree(params), "state": states}

    def _prepare(self, optimizer: Update, param: Array, state: dict[str, Any], name: str) -> None:
        prepare = getattr(optimizer, "prepare", None)
        if prepare is None:
            raise UsageError(
                f"the state of {optimizer!r} does not exist before its first update: give it a method prepare(param, state)"
            )
        prepare(param, state, **({"name": name} if takes_name(prepare) else {}))


def _piece(slot: Slot, first: int, own: Array) -> ShardedArray:
    """Return the elements of a parameter from ``first`` on as pieces of it."""
    return ShardedArray.of_range(slot.shape, first, own) if shape_of(own)[0] else ShardedArray(slot.shape, [], dtype_of(own))


def _entry(slot: Slot, first: int, param: Array, key: str, value: Any) -> ShardedArray:
    """Return an optimizer's state of a parameter as an array of that, or of one number."""
    shape = shape_of(value) if hasattr(value, "shape") else None
    if shape == ():
        return ShardedArray((), [((), value)])
    if shape == shape_of(param):
        return _piece(slot, first, value)
    found = f"shape {shape}" if shape is not None else f"type {type(value).__name__}"
    raise UsageError(
        f"the state {key!r} of the optimizer for {slot.name!r} has {found}, but a checkpoint can hold only arrays of the shape of its part of the "
        f"parameter, {shape_of(param)}, and of shape (): keep a number as np.zeros(())"
    )
