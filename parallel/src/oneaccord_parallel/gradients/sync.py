"""Gradients of all ranks, averaged during the backward pass."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Generator, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import array_api_compat
import numpy as np

from oneaccord.errors import DTypeError, LayoutError, SizeMismatchError, UsageError
from oneaccord_parallel.agreement import checked_weight, need_group, same_on_all, stories
from oneaccord_parallel.arrays import (
    Array,
    Memory,
    assignable,
    dtype_of,
    like,
    need_plain,
    oddity,
    place_of,
    readable,
    shape_of,
)
from oneaccord_parallel.compress import Compression, Compressor
from oneaccord_parallel.dtensor.dtensor import DTensor, lie_alike
from oneaccord_parallel.gradients.buckets import Bucket, Leaf, plan
from oneaccord_parallel.gradients.leaves import emptied, leaf_of, local_part, part_in_words
from oneaccord_parallel.overlaps import memory_of
from oneaccord_parallel.scaling import add_scaled, copy_divided, copy_scaled, copy_to, empty_like
from oneaccord_parallel.trees import flatten, rebuild

if TYPE_CHECKING:
    from oneaccord import Group, Work

__all__ = ["GradientSync", "Step"]

_numbers: weakref.WeakKeyDictionary[Group, itertools.count[int]] = weakref.WeakKeyDictionary()
"""The numbers of the syncs of each group, in the order in which they are made, which is the same on all ranks."""


class GradientSync:
    """The mean of all ranks' gradients, weighted: ``sum(weight * gradient) / sum(weight)``, by all_reduces that overlap with the backward pass.

    The weight is the count over which a rank's own gradient is the mean, usually its number of samples or tokens. The result then is the gradient of all
    samples, however they are divided; a rank without any takes part with weight 0, and its gradients do not matter.

    >>> sync = mp.GradientSync(group, like=params)
    >>> with sync.step(weight=len(batch)) as step:  # a backward pass by hand
    ...     step.ready("w2", g2)  # as soon as it is there; it travels while the next one is computed
    ...     step.ready("w1", g1)
    >>> params["w1"] -= 0.1 * g1  # the mean, in place
    >>> gradients = sync(gradients, weight=len(batch))  # or all at once: any tree, which is not changed

    Gradients are copied into *buckets*, which are filled in the reverse order of the leaves at first, and from the second step on in the order
    in which the gradients came on rank 0 in the first. A bucket travels when it is full and those before it have left, so that all ranks make
    the same calls in the same order, even if their gradients come in different orders. While a step is open, these calls are the group's; a
    program with collectives of its own in the backward pass gives this a group of its own: ``group.split(0)``.

    With ``reproducible``, the bits are those of one process that multiplies the gradient of each rank by its weight, adds the products as
    docs/guides/reductions.md says under "The same bits every time", and divides once by the sum of the weights, which are added in that order as well, in
    float64. All else is in the dtype of the gradient (see ``reduce_dtype``). Size of the buckets, backend and order of arrival change nothing.

    Parameters
    ----------
    group
        The ranks that average. The weights travel through host memory. While it lives, every rank must take as many steps.
    like
        The parameters, or any tree of arrays of their names, shapes and dtypes (floats or complex); alike on all ranks. Its values do not
        matter, and it is not kept. Names are paths: ``"layers.0.w"``. Of a `DTensor` the local parts are averaged, which must be the same part
        on all ranks of ``group``: those along an axis of the mesh on which it is replicated. Its gradient is a `DTensor` with the same
        placements, or the local part; its mean is a `DTensor`.
    bucket_bytes, first_bucket_bytes
        How much a bucket holds at most, and the first one, which should leave early. A gradient that is larger has a bucket of its own.
    reproducible
        Whether the bits depend on gradients and weights alone. NCCL cannot do that: give False there.
    reduce_dtype
        The dtype in which real gradients are summed, by name. By default their own; float32 for those of 16 bits and fewer, whose weighted
        sums would soon overflow (float16) or be coarse (bfloat16). The result has the dtype of the gradient in any case. Its own short dtype
        halves the messages.
    compress
        Makes the messages smaller: `compress.Cast` or `compress.PowerSGD`.
    timeout_s
        Seconds that each message may last.

    Attributes
    ----------
    group
        The ranks that average.
    memory
        The memory that this holds: bytes by purpose.

    Raises
    ------
    UsageError
        The ranks gave different trees or options; every rank raises it with the difference. Or a number of bytes is not positive.
    DTypeError
        A leaf is not of floats, or ``reduce_dtype`` is no dtype of floats.
    LayoutError
        A leaf is sparse, quantized, or without memory.
    """

    def __init__(
        self,
        group: Group,
        like: Any,
        *,
        bucket_bytes: int = 25 << 20,
        first_bucket_bytes: int = 1 << 20,
        reproducible: bool = True,
        reduce_dtype: str | None = None,
        compress: Compression | None = None,
        timeout_s: float | None = None,
    ) -> None:
        need_group(group)
        leaves, self._spec = flatten(like)
        self._wholes = {name: emptied(leaf) for name, leaf in leaves.items() if isinstance(leaf, DTensor)}
        self.group: Group = group
        self.memory: Memory = Memory(group)
        self._bytes = first_bucket_bytes, bucket_bytes
        self._reproducible = reproducible
        self._timeout_s = timeout_s
        options: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "first_bucket_bytes": first_bucket_bytes,
            "reproducible": reproducible,
        }
        options |= {"reduce_dtype": reduce_dtype, "compress": compress}
        told = {f"({name})": repr(value) for name, value in options.items()}
        parts = {name: part_in_words(leaf) for name, leaf in leaves.items() if isinstance(leaf, DTensor)}
        same_on_all(group, type(self).__name__, stories(leaves) | parts | told, timeout_s=timeout_s)
        leaves = {name: local_part(name, leaf) for name, leaf in leaves.items()}
        need_plain(type(self).__name__, leaves)
        if any(type(each) is not int or each < 1 for each in self._bytes):
            raise UsageError(
                f"a bucket must hold a positive number of bytes; {bucket_bytes=} and {first_bucket_bytes=} were given"
            )
        if not (compress is None or hasattr(compress, "begin")):
            raise UsageError(f"compress takes an object of mp.compress, such as Cast('bfloat16'), not {compress!r}")
        self._leaves = {name: leaf_of(name, leaf, reduce_dtype) for name, leaf in leaves.items()}
        self._compressor: Compressor | None = None if compress is None else compress.begin(self.memory)
        self._buckets: list[Bucket] = []
        self._home: dict[str, Bucket] = {}
        self._number = next(_numbers.setdefault(group, itertools.count(1)))
        self._is_ordered = False
        self._make_buckets(list(reversed(self._leaves)))
        self._pauses = 0
        self._spoilt = ""
        self._step: Step | None = None
        # Since the last step that was sent:
        self._used: set[str] = set()  # names whose sums the buckets hold
        self._weight = 0.0
        self._order: dict[str, None] = {}
        # In the step that is open:
        self._arrived: set[str] = set()
        self._next = 0  # the first bucket that has not left
        self._under_way: list[Generator[Work[Any], None, None]] = []
        self._works: list[Work[Any]] = []
        self._total_work: Work[Any] | None = None
        self._total = math.nan

    def step(self, weight: float = 1.0) -> Step:
        """Return a block in which the gradients of one backward pass become ready; at its end they are averaged.

        Parameters
        ----------
        weight
            Of this rank's gradients: a number that is finite and not negative. With 0 the rank takes part and contributes nothing.

        Raises
        ------
        UsageError
            The weight is invalid.
        """
        return Step(self, checked_weight(weight))

    def __call__(self, gradients: Any, weight: float = 1.0) -> Any:
        """Return the weighted mean of a whole tree; the tree is not changed.

        Parameters
        ----------
        gradients
            A tree with leaves of the names, shapes and dtypes of ``like``. Leaves may be missing, or None: this rank has no such gradients.
            None for a rank without any.
        weight
            As for `step`.

        Returns
        -------
        tree
            Of the structure of ``like``, with new arrays. None for a gradient that no rank has, and for everything if the step is paused.

        Raises
        ------
        UsageError, SizeMismatchError, DTypeError, LayoutError
            As `Step.ready`, before anything is sent; and as the end of a `step`.
        """
        leaves = flatten(gradients)[0]
        if not leaves and checked_weight(weight) and self._leaves:
            raise UsageError(f"there are no gradients, so their weight must be 0, not {weight!r}")
        leaves = {name: self._part_of(name, gradient) for name, gradient in leaves.items()}
        for name, gradient in leaves.items():
            self._check(name, gradient)
        means = self._all_at_once({name: readable(gradient) for name, gradient in leaves.items()}, weight).gradients
        return rebuild(self._spec, {name: means.get(name) for name in self._leaves})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the steps in this block only add up gradients, on this rank; the next step outside of it sends all.

        Gradients and weights both add up. So any number of paused steps and one that is not are one step over all their batches: the
        result is the mean over all of them, and needs no further division. The numbers of paused steps may differ between ranks.

        Raises
        ------
        UsageError
            A step is open.
        """
        if self._step is not None:
            raise UsageError("a step is open; pause before it begins: with sync.paused(), sync.step(): ...")
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def state(self) -> dict[str, Any]:
        """Return the data that the compression of this rank keeps from step to step, for a checkpoint: a tree of arrays and numbers, not copied.

        Without compression it is empty. With it, each rank has its own: save it as ``mp.PerRank(sync.state())``.
        """
        return {} if self._compressor is None else self._compressor.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state` on this rank, with the same compression. All ranks should, or none.

        Parameters
        ----------
        state
            The result of `state`.

        Raises
        ------
        UsageError
            It does not belong to these gradients or this compression. Nothing has changed.
        """
        known = self.state()
        if set(state) != set(known):
            raise UsageError(f"the state has {sorted(state)}, and this compression has {sorted(known)}")
        for name in [name for value in state.values() if isinstance(value, Mapping) for name in value]:
            if name not in self._leaves:
                raise UsageError(f"the state is of {name!r}, and there is no such gradient here")
        for name, error in state.get("errors", {}).items():
            if shape_of(error) != self._leaves[name].shape:
                raise UsageError(f"the state has shape {shape_of(error)} for {name!r}; expected {self._leaves[name].shape}")
        if self._compressor is not None:
            copies = {
                key: {name: copy_to(self._leaves[name].template, array) for name, array in value.items()}
                if isinstance(value, Mapping)
                else value
                for key, value in state.items()
            }
            self._compressor.load_state(copies)

    # The actions of a step.

    def _all_at_once(self, gradients: Mapping[str, Array], weight: float) -> Step:
        """Take a step in which all gradients are there at once."""
        with self.step(weight) as step:
            for bucket in self._buckets:
                for name in bucket.views:
                    if name in gradients:
                        self._arrive(name, gradients[name])
        return step

    def _begin(self, step: Step, weight: float) -> None:
        if self._spoilt:
            raise UsageError(f"this {type(self).__name__} cannot continue, because {self._spoilt}; make a new one on all ranks")
        if self._step is not None:
            raise UsageError("a step is open already; end it first, and call backward once in each: paused steps add up")
        self._step = step
        self._arrived.clear()
        self._weight += weight
        if not step.is_paused:
            self._next = 0
            self._under_way, self._works = [], []
            for bucket in self._buckets:
                bucket.missing = len(bucket.views)
            self._total = math.nan
            # By now, so that it has come when it is needed.
            self._total_work = self._all_reduce(np.array([self._weight, self._number, self._number**2]))

    def _check(self, name: str, gradient: Any) -> None:
        """Raise an error for a value that is not a gradient of that name."""
        leaf = self._check_kind(name, gradient)
        words = oddity(gradient)
        if words:
            raise LayoutError(f"the gradient of {name!r} is {words}")
        if place_of(gradient) != leaf.place:
            raise UsageError(f"the gradient of {name!r} is an array of {place_of(gradient)}; expected one of {leaf.place}")

    def _part_of(self, name: str, gradient: Any) -> Any:
        """Return the local part of a distributed gradient, which must have the placements of the leaf of ``like``; any other value as it is."""
        if not isinstance(gradient, DTensor):
            return gradient
        whole = self._wholes.get(name)
        if whole is None or not lie_alike(gradient, whole):
            expected = (
                "a DTensor in like= as well" if whole is None else f"one that lies as that of like=, {list(whole.placements)}"
            )
            raise UsageError(f"the gradient of {name!r} is {gradient!r}; expected {expected}")
        return gradient.local

    def _check_kind(self, name: str, gradient: Any) -> Leaf:
        """Raise an error for another name, shape or dtype; return the facts about the leaf."""
        leaf = self._leaves.get(name)
        if leaf is None:
            near = ", ".join(sorted(self._leaves)[:8]) + (", ..." if len(self._leaves) > 8 else "")
            raise UsageError(f"there is no gradient {name!r} here; the names are those of the leaves of like=: {near}")
        if gradient is None or not hasattr(gradient, "dtype"):
            raise DTypeError(f"the gradient of {name!r} must be an array, not a {type(gradient).__name__}")
        if shape_of(gradient) != leaf.shape:
            raise SizeMismatchError(f"the gradient of {name!r} has shape {shape_of(gradient)}; expected {leaf.shape}")
        if dtype_of(gradient) != leaf.dtype:
            raise DTypeError(f"the gradient of {name!r} is {dtype_of(gradient)}; expected {leaf.dtype}")
        return leaf

    def _arrive(self, name: str, gradient: Array) -> None:
        """Take a gradient that is ready, and send the buckets that are full."""
        step = self._step
        assert step is not None
        if name in self._arrived:
            raise UsageError(
                f"the gradient of {name!r} was ready already in this step; add up the gradients that belong together first, or take a step for "
                "each backward pass: paused steps add up"
            )
        self._arrived.add(name)
        bucket = self._home[name]
        if step.weight:
            view = bucket.views[name]
            if name in self._used:
                add_scaled(view, gradient, step.weight)
            else:
                copy_scaled(view, gradient, step.weight)
                self._used.add(name)
            if not self._is_ordered:
                self._order.setdefault(name)
        if not step.is_paused:
            bucket.missing -= 1
            if not bucket.missing:
                self._send_full()

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send_rest(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        bucket.mark(self._used)
        if bucket.channel is None:
            self._works.append(self._all_reduce(bucket.flat))
        elif self._total_weight():
            copy_divided(bucket.values, bucket.values, self._total_weight())
            rounds = bucket.channel.reduce(self._used, self._all_reduce)
            self._under_way.append(rounds)
            self._works.append(next(rounds))

    def _all_reduce(self, buffer: Array) -> Work[Any]:
        return self.group.all_reduce_async(buffer, out=buffer, reproducible=self._reproducible, timeout_s=self._timeout_s)

    def _total_weight(self) -> float:
        """Return the weight of all ranks; waits for it. The numbers with it show whether all ranks are in a step of the same sync."""
        if self._total_work is not None:
            total, numbers, squares = map(float, self._total_work.wait())
            self._total_work = None
            if numbers**2 != squares * self.group.world_size:  # equal if, and only if, all numbers are
                raise UsageError(
                    f"this is a step of sync number {self._number} of its group, and other ranks are in a step of another one: every "
                    "rank must use its syncs in the same order",
                    rank=self.group.rank,
                )
            self._total = total
        return self._total

    def _end(self, step: Step) -> None:
        if not step.is_paused:
            self._send_rest()
            total = self._total_weight()
            self._wait()
            if total:
                self._hand_over(step, 1.0 if self._compressor else total)
                if self._compressor is not None:
                    self._compressor.end_step()
            self._used = set()
            self._weight = 0.0
            if not total:
                self._step = None
                raise UsageError(
                    "the weights of all ranks are 0, so there is no mean; nothing has changed", rank=self.group.rank
                )
            if not self._is_ordered:
                self._learn_order()
        self._step = None

    def _wait(self) -> None:
        """Wait until all sums are there; before that nothing that the caller has is written to."""
        works, rounds = self._works, self._under_way
        self._works, self._under_way = [], []
        if not rounds:
            for work, bucket in zip(works, self._buckets, strict=False):
                work.wait()
                self._summed(bucket)
            return
        while works:
            going = []
            for work, channel in zip(works, rounds, strict=True):
                work.wait()
                following = next(channel, None)
                if following is not None:
                    going.append((following, channel))
            works, rounds = [work for work, _ in going], [channel for _, channel in going]

    def _summed(self, bucket: Bucket) -> None:
        """Do the work that need not wait for the other buckets."""

    def _hand_over(self, step: Step, divisor: float) -> None:
        """Write the means to their places."""
        for bucket in self._buckets:
            unused = bucket.unused() if not self._used.issuperset(bucket.views) else set()
            for name, view in bucket.views.items():
                if name in unused:
                    continue
                leaf = self._leaves[name]
                target = step._targets.get(name)
                mean = empty_like(leaf.template, leaf.shape) if target is None else readable(target)
                copy_divided(mean, view, divisor)
                step._means[name] = mean if target is None else target

    def _learn_order(self) -> None:
        """Make the buckets again, in the order in which the gradients came on rank 0; the ranks agree on it, once."""
        numbers = {name: number for number, name in enumerate(self._leaves)}
        expected = [name for bucket in self._buckets for name in bucket.views]
        order = [*self._order, *(name for name in expected if name not in self._order)]
        found = np.array([bool(self._order), *(numbers[name] for name in order)])
        self.group.broadcast(found, out=found, timeout_s=self._timeout_s)
        if found[0]:
            self._is_ordered = True
            names = list(self._leaves)
            order = [names[number] for number in found[1:]]
            if order != expected:
                self._finish_reading()
                self._make_buckets(order)

    def _finish_reading(self) -> None:
        """Let the host wait until the current stream has read the buckets: on a GPU, memory that is given up goes to its own stream at once."""
        for bucket in self._buckets:
            bucket.unused()

    def _make_buckets(self, order: list[str]) -> None:
        self._buckets, self._home = [], {}  # the memory of the old ones first
        for names in plan(self._leaves, order, *self._bytes):
            bucket = Bucket(names, self._leaves, self.memory)
            if self._compressor is not None:
                bucket.channel = self._compressor.channel(bucket.layout, bucket.flat)
            self._buckets.append(bucket)
            self._home.update(dict.fromkeys(names, bucket))

    def _abandon(self, error: BaseException) -> None:
        """Take note that an error ended a step: other ranks may wait for messages that this one will never send."""
        self._step = None
        if not self._spoilt:
            self._spoilt = f"an error ended a step ({type(error).__name__}: {error})"


class Step:
    """One backward pass: the block of `GradientSync.step`.

    The end of the block waits for all ranks. If it raises, or an exception ends the block, no gradient of the caller has been changed,
    and the sync takes no further steps: other ranks may be waiting for messages that this one has not sent, and get an `AbortedError` when this one
    leaves the group. There is one exception: if the weights of all ranks are 0, all ranks raise a `UsageError` and may continue.

    Attributes
    ----------
    weight
        Of this rank's gradients.
    is_paused
        Whether the gradients are only added up, for a later step.

    Raises
    ------
    UsageError
        At the beginning: another step is open, or one before was left by an error. At the end: the weights of all ranks are 0.
    CommError
        At the end: a rank is lost, or another failure of the group.
    """

    def __init__(self, sync: GradientSync, weight: float) -> None:
        self.weight: float = weight
        self._targets: dict[str, Array] = {}
        self._means: dict[str, Array] = {}
        self._written: set[Hashable] = set()  # the memory of the targets
        self.is_paused: bool = False
        self._sync = sync
        self._has_begun = False

    def __del__(self) -> None:
        if not self._has_begun:
            warnings.warn("a step was made but never begun: write `with sync.step(...):`", RuntimeWarning, stacklevel=2)

    def __enter__(self) -> Self:
        self._has_begun = True
        self.is_paused = self._sync._pauses > 0
        self._targets, self._means, self._written = {}, {}, set()
        try:
            self._sync._begin(self, self.weight)
        except BaseException as failure:
            if self._sync._step is self:
                self._sync._abandon(failure)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._sync._abandon(error)
            return
        try:
            self._sync._end(self)
        except BaseException as failure:
            if self._sync._step is self:
                self._sync._abandon(failure)
            raise

    @property
    def gradients(self) -> dict[str, Array]:
        """After the block, the mean gradients by name: also those that only other ranks had, and not those that no rank had.

        They are the arrays that became ready here, or new ones. Empty if the step was paused.
        """
        leaves = self._sync._leaves
        means = {name: like(mean, leaves[name].template) for name, mean in self._means.items()}
        wholes = self._sync._wholes
        return {
            name: DTensor(mean, wholes[name].mesh, wholes[name]._spec) if name in wholes else mean
            for name, mean in means.items()
        }

    def ready(self, name: str, gradient: Array) -> None:
        """Say that a gradient is there. It is copied, and may be written to at once; at the end of the block it holds the mean.

        Each gradient is ready at most once in a step. One that never is counts as not used by this rank: it contributes zeros, and if
        no rank uses it, it stays unchanged. An array that becomes ready under several names, such as one that is used again and again, holds the
        mean of the first one; `gradients` has those of all. Different arrays must not overlap.

        Parameters
        ----------
        name
            The path of the leaf, such as ``"layers.0.w"``.
        gradient
            An array of its shape and dtype, in the same place as the parameter. JAX arrays never change: take their means from
            `gradients`.

        Raises
        ------
        UsageError
            There is no such name, it was ready already, or the block has not begun or has ended.
        SizeMismatchError, DTypeError
            The shape or the dtype is another one.
        LayoutError
            Its mean cannot be written into the array, which is read-only, a number, or repeats elements, as expanded tensors do; a step that
            is paused takes these. Or the array is sparse, quantized, or without memory.
        CommError
            The group has failed.
        """
        if self._sync._step is not self:
            raise UsageError("gradients become ready inside of the block of their step: with sync.step() as step: ...")
        gradient = self._sync._part_of(name, gradient)
        self._sync._check(name, gradient)
        can_hold = assignable(gradient)
        if not (can_hold or self.is_paused or array_api_compat.is_jax_array(gradient)):
            raise LayoutError(
                f"the mean of {name!r} is written into its gradient, and this {type(gradient).__name__} cannot hold it, since it is read-only, a "
                "number, or repeats elements, as an expanded tensor does: give a copy, by np.array(x) or x.clone(), or the whole tree: sync(tree)"
            )
        self._sync._arrive(name, readable(gradient))
        if can_hold and memory_of(gradient) not in self._written:
            self._written.add(memory_of(gradient))
            self._targets[name] = gradient
