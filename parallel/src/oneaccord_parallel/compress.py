"""Compression of gradients: fewer bytes on the way, at the price of some error, most of which error feedback takes back.

>>> sync = mp.GradientSync(group, like=params, compress=mp.compress.Cast("bfloat16"))

The compressed data are this rank's share of the mean: its gradient times its weight, divided by the weight of all ranks. So nothing overflows
in a short dtype that would not overflow on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from oneaccord.errors import UsageError
from oneaccord_parallel.arrays import Array, Memory, dtype_of, itemsize, namespace, shape_of
from oneaccord_parallel.layout import Layout, Slot
from oneaccord_parallel.scaling import copy_scaled, copy_to, empty_like

if TYPE_CHECKING:
    from oneaccord import Work

__all__ = ["Cast", "Compression", "PowerSGD"]

AllReduce = Callable[[Array], "Work[Any]"]
"""Begins the sum over all ranks of a buffer, in place."""


class Compression(Protocol):
    """How gradients are compressed: the value of ``compress`` of `GradientSync`. Alike on all ranks, by its ``repr``."""

    def begin(self, memory: Memory) -> Compressor:
        """Return the compressor of one `GradientSync`.

        Parameters
        ----------
        memory
            Makes its buffers.
        """
        ...


class Compressor(Protocol):
    """The compressor of the buckets of one `GradientSync`, on one rank; it keeps data that must outlive a step, by the names of leaves."""

    def channel(self, layout: Layout, flat: Array) -> Channel:
        """Return the compressor of one bucket: ``flat`` holds arrays as ``layout`` says, and after them a mark for each."""
        ...

    def end_step(self) -> None:
        """Take note that all buckets of a step are done."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the data that must outlive a step."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`; its arrays are now this compressor's."""
        ...


class Channel(Protocol):
    """The compressor of one bucket."""

    def reduce(self, used: set[str], all_reduce: AllReduce) -> Generator[Work[Any], None, None]:
        """Replace the shares in the bucket by their sums over all ranks, and so the marks.

        Parameters
        ----------
        used
            The leaves that this rank has used; it holds zeros for the others.
        all_reduce
            Begins a sum.

        Yields
        ------
        Work
            The work to wait for before the next round. All ranks yield as often.
        """
        ...


@dataclass(frozen=True)
class Cast:
    """Gradients travel in another dtype, usually a shorter one, and are summed in it.

    Parameters
    ----------
    dtype
        By name: ``"bfloat16"`` or ``"float16"``. NumPy needs ml_dtypes for bfloat16.
    error_feedback
        Whether each rank keeps the loss of the conversion of its gradient, and adds it to its next one. It costs memory of the size of the
        gradients. The loss of the sums over ranks is not kept.

    Raises
    ------
    UsageError
        ``dtype`` is no dtype of real floats.
    DTypeError
        The dtype does not exist here.
    """

    dtype: str
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if not str(self.dtype).startswith(("float", "bfloat")):
            raise UsageError(f"gradients are cast to a dtype of floats, such as 'bfloat16', not to {self.dtype!r}")
        itemsize(self.dtype)

    def begin(self, memory: Memory) -> Compressor:
        """Return the caster of one `GradientSync`.

        Parameters
        ----------
        memory
            Makes its buffers.
        """
        return _CastCompressor(self, memory)


@dataclass(frozen=True)
class PowerSGD:
    """Gradients of matrices travel as the product of two thin matrices: PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019).

    For a gradient of shape ``(n, m)`` and a rank r, ``(n + m) r`` numbers travel instead of ``n m``: one step of power iteration, which begins
    at the end of the last step. Arrays with more axes count as matrices of shape ``(n, the rest)``. The part that the product does not hold is added to
    the next gradient (error feedback), so that the sums over many steps are those of the uncompressed gradients, up to the last error.

    Parameters
    ----------
    rank
        The rank of the product; at most the smaller extent is used.
    start_step
        The number of steps at the beginning that are not compressed. Trainings from scratch often need some, since the first gradients
        are large and change quickly.
    seed
        Of the matrices that the iteration begins with; alike on all ranks.
    min_compression_rate
        Only what shrinks more than so many times is compressed. With 0 all matrices are. Arrays of fewer than two axes, complex ones and those
        that are summed in 16 bits never are.
    error_feedback
        Whether errors are kept. It costs memory of the size of the gradients.

    Raises
    ------
    UsageError
        A number is negative, or the rank is below 1.
    """

    rank: int = 1
    start_step: int = 0
    seed: int = 0
    min_compression_rate: float = 2.0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1 or self.start_step < 0 or self.seed < 0 or not self.min_compression_rate >= 0:
            raise UsageError(f"PowerSGD takes a rank of at least 1, and no negative numbers, not {self}")

    def begin(self, memory: Memory) -> Compressor:
        """Return the compressor of one `GradientSync`.

        Parameters
        ----------
        memory
            Makes its buffers.
        """
        return _PowerCompressor(self, memory)


class _Errors:
    """The loss of compression so far, for each leaf."""

    def __init__(self, memory: Memory, is_on: bool) -> None:
        self._memory = memory
        self._is_on = is_on
        self.kept: dict[str, Array] = {}

    def add_to(self, name: str, share: Array) -> None:
        """Add the last error of a leaf to its share, which is then the value to send."""
        if name in self.kept:
            share += self.kept[name]

    def keep(self, name: str, share: Array, sent: Array) -> None:
        """Keep the part of a share that is not sent. A part that is not finite is dropped, or it would spoil all steps to come."""
        if not self._is_on:
            return
        error = self.kept.get(name)
        if error is None:
            error = self.kept[name] = self._memory.empty("errors", shape_of(share), dtype_of(share), share)
        with np.errstate(all="ignore"):
            error[...] = share
            error -= sent
            if not math.isfinite(abs(complex(error.sum()))):
                error[...] = 0


class _CastCompressor:
    def __init__(self, cast: Cast, memory: Memory) -> None:
        self.cast = cast
        self.memory = memory
        self.errors = _Errors(memory, cast.error_feedback)

    def channel(self, layout: Layout, flat: Array) -> Channel:
        return _CastChannel(self, layout, flat)

    def end_step(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"errors": dict(self.errors.kept)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.errors.kept = dict(state["errors"])


class _CastChannel:
    def __init__(self, owner: _CastCompressor, layout: Layout, flat: Array) -> None:
        self._errors, self._layout, self._flat = owner.errors, layout, flat
        # A complex number is two real ones, and there is no shorter complex dtype.
        dtype = layout.dtype if layout.dtype.startswith("complex") else owner.cast.dtype
        self._wire = owner.memory.empty("compressed", shape_of(flat), dtype, flat)
        self._sent = layout.views(self._wire)

    def reduce(self, used: set[str], all_reduce: AllReduce) -> Generator[Work[Any], None, None]:
        views = self._layout.views(self._flat)
        for name in used.intersection(views):
            self._errors.add_to(name, views[name])
        copy_scaled(self._wire, self._flat, 1)
        for name in used.intersection(views):
            self._errors.keep(name, views[name], self._sent[name])
        yield all_reduce(self._wire)
        copy_scaled(self._flat, self._wire, 1)


class _PowerCompressor:
    def __init__(self, config: PowerSGD, memory: Memory) -> None:
        self.config = config
        self.memory = memory
        self.errors = _Errors(memory, config.error_feedback)
        self.right: dict[str, Array] = {}  # Q of the paper, for each leaf
        self.steps = 0

    def channel(self, layout: Layout, flat: Array) -> Channel:
        return _PowerChannel(self, layout, flat)

    def end_step(self) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"errors": dict(self.errors.kept), "right": dict(self.right), "steps": self.steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.errors.kept, self.right, self.steps = dict(state["errors"]), dict(state["right"]), int(state["steps"])

    def start(self, slot: Slot, extent: int, rank: int, template: Array) -> Array:
        """Return the matrix of a leaf with which the iteration begins: its last one, or a random one."""
        right = self.right.get(slot.name)
        if right is None or shape_of(right) != (extent, rank):
            # The name counts, so that two leaves of one shape differ; the order of leaves does not, since buckets change.
            rng = np.random.default_rng((self.config.seed, *slot.name.encode()))
            right = self.right[slot.name] = empty_like(template, (extent, rank))
            right[...] = copy_to(template, rng.standard_normal((extent, rank)))
        return right


class _PowerChannel:
    def __init__(self, owner: _PowerCompressor, layout: Layout, flat: Array) -> None:
        self._owner, self._layout, self._flat = owner, layout, flat
        self._matrices: list[tuple[Slot, int, int, int]] = []  # with n, m and the rank
        self._plain: list[tuple[int, int]] = []  # ranges of ``flat`` that travel as they are
        for slot in layout.slots:
            extents = _matrix(slot, layout.dtype, owner.config)
            if extents is not None:
                self._matrices.append((slot, *extents))
            elif self._plain and self._plain[-1][1] == slot.start:
                self._plain[-1] = (self._plain[-1][0], slot.stop)
            else:
                self._plain.append((slot.start, slot.stop))
        self._plain.append((layout.size, shape_of(flat)[0]))  # the marks
        plain = sum(stop - start for start, stop in self._plain)
        lefts = sum(n * rank for _, n, _, rank in self._matrices)
        rights = sum(m * rank for _, _, m, rank in self._matrices)
        if self._matrices:
            self._first = owner.memory.empty("compressed", lefts + plain, layout.dtype, flat)
            self._second = owner.memory.empty("compressed", rights, layout.dtype, flat)

    def reduce(self, used: set[str], all_reduce: AllReduce) -> Generator[Work[Any], None, None]:
        owner = self._owner
        if not self._matrices or owner.steps < owner.config.start_step:
            yield all_reduce(self._flat)
            return
        qr = namespace(self._flat).linalg.qr
        parts: list[tuple[Slot, Array, Array, Array]] = []
        at_left = at_right = 0
        for slot, n, m, rank in self._matrices:
            share = self._flat[slot.start : slot.stop].reshape(n, m)
            left = self._first[at_left : at_left + n * rank].reshape(n, rank)
            right = self._second[at_right : at_right + m * rank].reshape(m, rank)
            at_left, at_right = at_left + n * rank, at_right + m * rank
            if slot.name in used:
                owner.errors.add_to(slot.name, share.reshape(slot.shape))
            _multiply(left, share, owner.start(slot, m, rank, share))
            parts.append((slot, share, left, right))
        at = at_left
        for start, stop in self._plain:
            self._first[at : at + stop - start] = self._flat[start:stop]
            at += stop - start
        yield all_reduce(self._first)
        at = at_left
        for start, stop in self._plain:
            self._flat[start:stop] = self._first[at : at + stop - start]
            at += stop - start
        for slot, share, left, right in parts:
            n, m = shape_of(share)
            left[...] = qr(left)[0]
            _multiply(right, share.T, left)
            if slot.name in used:
                sent = empty_like(share, (n, m))
                _multiply(sent, left, right.T)
                owner.errors.keep(slot.name, share.reshape(slot.shape), sent.reshape(slot.shape))
        yield all_reduce(self._second)
        for slot, share, left, right in parts:
            _multiply(share, left, right.T)
            if math.isfinite(float(right.sum())):
                owner.right[slot.name][...] = right
            else:
                del owner.right[slot.name]  # begin again


def _matrix(slot: Slot, dtype: str, config: PowerSGD) -> tuple[int, int, int] | None:
    """Return n, m and the rank of a leaf that is worth compressing."""
    if len(slot.shape) < 2 or slot.size == 0 or dtype.startswith("complex") or itemsize(dtype) < 4:
        return None
    n = slot.shape[0]
    m = slot.size // n
    rank = min(n, m, config.rank)
    return (n, m, rank) if (n + m) * rank * config.min_compression_rate < n * m else None


def _multiply(target: Array, one: Array, other: Array) -> None:
    """Set ``target = one @ other``, without a warning about values that are not finite."""
    with np.errstate(all="ignore"):
        namespace(target).matmul(one, other, out=target)
