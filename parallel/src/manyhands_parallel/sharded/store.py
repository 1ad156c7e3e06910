"""What a sharded model and a sharded optimizer have in common: units, the sums of their gradients, updates and state."""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from manyhands import DeviceMesh, Group, Work
from manyhands.errors import ManyHandsError, UsageError
from manyhands_parallel import trees
from manyhands_parallel.arrays import Array, Memory, dtype_of, itemsize, like, readable, shape_of, summed_in
from manyhands_parallel.clip import clip_by_global_norm
from manyhands_parallel.optimizers import Update
from manyhands_parallel.scaling import add_scaled, copy_divided, copy_scaled, copy_to
from manyhands_parallel.sharded.ranks import Ranks, Strategy
from manyhands_parallel.sharded.units import Part, Unit, divide
from manyhands_parallel.sharded_arrays import ShardedArray

__all__ = ["Store"]


class _Sum(NamedTuple):
    """A sum of gradients under way: ``flat`` is what is summed, and ``target`` where this rank's part goes."""

    part: Part
    flat: Array
    target: Array
    work: Work[Array]


class Store:
    """Parameters in units, of each of which every rank has a shard; not for users: see `Sharded` and `ShardedOptimizer`.

    Attributes
    ----------
    memory
        What makes the buffers, and counts their bytes: ``"parameters"``, ``"gradients"`` (the shards), ``"unit gradients"`` (those that are
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
        failure: ManyHandsError | None = None
        found: list[Unit] = []
        try:
            found, self._spec = divide(params, units, self._ranks.parts)
            self._units = {unit.name: unit for unit in found}
            lines += [
                f"unit {unit.name!r}: {slot.name!r} {part.layout.dtype}{list(slot.shape)}"
                for unit in found
                for part in unit.parts
                for slot in part.layout.slots
            ]
        except ManyHandsError as error:
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
        leaves = trees.named(params)
        for unit in found:
            for part in unit.parts:
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
            for slot, first, last in layout.within(mine.start, mine.stop):
                start = slot.start + first - mine.start
                part.shard[start : start + last - first] = readable(leaves[slot.name]).reshape(-1)[first:last]
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
        for unit in self._units.values():
            yield from unit.parts

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
        for part in self._parts():
            part.gradient = None

    def _release(self) -> None:
        """Give up what belongs to a step alone."""

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

    def _pack(self, part: Part, gradients: Mapping[str, Array] | None) -> Array:
        """Return a flat buffer of weighted gradients; zeros, where this rank has none."""
        flat = self._empty_sum(part)
        if gradients is None or self._weight == 0:
            flat[...] = 0  # and not 0 times what may be infinite
        else:
            flat[part.layout.size :] = 0
            for slot in part.layout.slots:
                copy_scaled(slot.view(flat), readable(gradients[slot.name]), self._weight)
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
        """Wait for the sums under way, so that what they read is given back; the sum over ``replicate`` goes on in the background."""
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
            part.gradient = total  # where the parameters are shorter, only the mean is sure to fit
        else:
            part.gradient = self._empty(part, "gradients", part.layout.shard_size)
            part.gradient[...] = total

    def _compare(self, weight: float | None) -> None:
        """Compare what the ranks did, and add up their weights; one small message.

        Raises
        ------
        UsageError
            They did different things, or no rank has a weight; on every rank.
        """
        log, self._log = self._log, []
        digest = hashlib.blake2b("\n".join(log).encode(), digest_size=16).digest()
        records = self._ranks.gather(struct.pack("=d", weight or 0.0) + digest)
        if len({record[8:] for record in records}) > 1:
            self._ranks.agree(log, None, "the ranks did different things in this step, and its gradients are dropped")
        if weight is None:
            return
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

        Both may be written to. A unit that no rank has reduced is left out. A shard has no padding, and may be empty.

        >>> for p, g in store.shards():
        ...     p -= 0.1 * g

        Raises
        ------
        UsageError
            There are no gradients: no step has ended since the last `update`.
        """
        return [(self._real(part, part.shard), self._real(part, part.gradient)) for part in self._ready("shards()")]

    def clip_by_global_norm(
        self,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        timeout_s: float | None = None,
    ) -> float:
        """Scale the mean gradients so that their norm over all parameters is at most ``max_norm``, before `update`. Every rank must call it.

        It counts each element once, whatever the strategy divides or repeats, by `mp.clip_by_global_norm`.

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
            `SGD`, `Adam`, `AdamW` or any function ``update(param, grad, state)`` that changes ``param`` in place: flat arrays without padding,
            which may be empty, and a dict that is kept for the next call. It must work element by element if all strategies and numbers of
            ranks shall give the same result.

        Raises
        ------
        UsageError
            There are no gradients: no step has ended since the last update. Or a checkpoint has brought counters of units that were updated
            unequally often, and that are one unit here. Nothing has changed.
        Exception
            What ``optimizer`` raised; the units before have been updated then.
        """
        ready = self._ready("update()")
        for part in ready:
            self._take_counters(part)
        for part in ready:
            optimizer(self._real(part, part.shard), self._real(part, part.gradient), part.state)
            self._count(part)
            self._give_counters(part)
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
        ready = [part for part in self._parts() if part.gradient is not None]
        if not ready:
            raise UsageError(f"{call} found no gradients: no unit was reduced in the last step")
        if not self._is_mean:
            for part in ready:
                total = part.gradient
                if dtype_of(total) != part.layout.dtype:
                    part.gradient = self._empty(part, "gradients", part.layout.shard_size)
                copy_divided(part.gradient, total, self._total)
        self._is_mean = self._is_stale = True
        return ready

    def _real(self, part: Part, shard: Array) -> Array:
        """Return a shard without padding."""
        return shard[: max(min(part.layout.size - self._ranks.part * part.layout.shard_size, part.layout.shard_size), 0)]

    def _count(self, part: Part) -> None:
        """Count the arrays of an optimizer's state, whoever made them; counters of shape () are left out."""
        for key, value in part.state.items():
            known = part.counted.get(key)
            if getattr(value, "shape", ()) != () and (known is None or known() is not value):
                self.memory.adopt("state", value)
                part.counted[key] = weakref.ref(value)

    # The whole, and what a checkpoint holds

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
        return trees.rebuild(self._spec, {name: leaves[name] for name in self._order()})

    def _arrive(self, part: Part) -> None:
        """Wait until the parameters that this rank holds whole are those of all ranks."""
        if part.pending is not None:
            part.pending.wait()
            part.pending = None

    def _order(self) -> list[str]:
        """Return the names of all leaves, in the order of the tree."""
        paths = self._spec.paths()
        return [".".join(map(str, path)) for path in paths]

    def state(self, optimizer: Update | None = None) -> dict[str, Any]:
        """Return what a checkpoint holds, as a tree of `ShardedArray` leaves that are views: write into them to load one.

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
            ``"params"``: a tree like the given one. ``"state"``: for each parameter by name, the entries of the optimizer's state.

        Raises
        ------
        UsageError
            A step is under way, ``optimizer`` can not prepare its state, or that holds something that is no array of the shape of the shard
            or of shape ().
        """
        self._outside("state()")
        self._is_stale = True
        params: dict[str, ShardedArray] = {}
        states: dict[str, dict[str, ShardedArray]] = {}
        for part in self._parts():
            self._arrive(part)  # or it would overwrite what a checkpoint brings
            shard = self._real(part, part.shard)
            if optimizer is not None and not part.state:
                prepare = getattr(optimizer, "prepare", None)
                if prepare is None:
                    raise UsageError(
                        f"the state of {optimizer!r} does not exist before its first update: give it a method prepare(param, state)"
                    )
                prepare(shard, part.state)
                self._count(part)
            params |= self._split(part, shard)
            for key, value in part.state.items():
                shape = shape_of(value) if hasattr(value, "shape") else None
                if shape == shape_of(shard):
                    entries = self._split(part, value)
                elif shape == ():
                    if key not in part.counters:
                        part.counters[key] = {slot.name: copy_to(value, value) for slot in part.layout.slots}
                    entries = {name: ShardedArray((), [((), counter)]) for name, counter in part.counters[key].items()}
                else:
                    found = f"shape {shape}" if shape is not None else f"type {type(value).__name__}"
                    raise UsageError(
                        f"the state {key!r} of the optimizer has {found}, and a checkpoint can hold arrays of the shape of the shard, "
                        f"{shape_of(shard)}, and of shape (): keep a number as np.zeros(())"
                    )
                for name, entry in entries.items():
                    states.setdefault(name, {})[key] = entry
        return {"params": trees.rebuild(self._spec, {name: params[name] for name in self._order()}), "state": states}

    def _take_counters(self, part: Part) -> None:
        """Let the optimizer go on from the counters that a checkpoint may have brought."""
        for key, counters in part.counters.items():
            found = {name: counter.item() for name, counter in counters.items()}
            if len(set(found.values())) > 1:
                told = ", ".join(f"{value} for {name!r}" for name, value in list(found.items())[:5])
                raise UsageError(
                    f"a checkpoint has brought {key!r} of the optimizer as {told}, and they are one unit here: it is from other units, which "
                    "were updated unequally often; make this with the same units"
                )
            part.state[key][...] = next(iter(found.values()))

    def _give_counters(self, part: Part) -> None:
        for key, counters in part.counters.items():
            for counter in counters.values():
                counter[...] = part.state[key]

    def _split(self, part: Part, shard: Array) -> dict[str, ShardedArray]:
        """Return a shard as pieces of the parameters that it holds elements of, by name."""
        start = self._ranks.part * part.layout.shard_size
        found = {slot.name: ShardedArray(slot.shape, [], dtype_of(shard)) for slot in part.layout.slots}
        for slot, first, last in part.layout.within(start, start + shape_of(shard)[0]):
            begin = slot.start + first - start
            found[slot.name] = ShardedArray.of_range(slot.shape, first, shard[begin : begin + last - first])
        return found
