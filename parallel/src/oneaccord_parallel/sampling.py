"""Which samples of a data set are this rank's: alike on all ranks without a message, and resumable on another number of ranks."""

from __future__ import annotations

import operator
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from oneaccord.errors import UsageError

__all__ = ["Ranked", "Sampler", "shard_indices"]

T = TypeVar("T")
Indices = npt.NDArray[np.int64]
_FRAMES = 16
"""How many calls may lie between a loader and the sampler."""
_MODES = ("keep", "pad", "drop")


class Ranked(Protocol):
    """An object with a rank and the number of ranks, such as a `Group`."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0 on."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""


def shard_indices(
    n: int, group: Ranked, epoch: int = 0, seed: int = 0, uneven: str = "keep", shuffle: bool = True, *, start: int = 0
) -> Indices:
    """Return which of ``n`` samples are this rank's in an epoch, in the order of use.

    All ranks know the same order of the samples, ``np.random.default_rng((seed, epoch)).permutation(n)``, and rank r of p takes those at
    r, r + p, r + 2p and so on. No message is sent. Together the ranks use the samples in that order, so that an epoch can be taken up
    in its middle, also by another number of ranks.

    Parameters
    ----------
    n
        The number of samples.
    group
        A `Group`, or any object with a ``rank`` and a ``world_size``.
    epoch
        The number of the epoch, from 0 on: each has an order of its own.
    seed
        From 0 on, the same on all ranks.
    uneven
        The rule if the ranks do not divide the samples. ``"keep"``: every sample is used once, and some ranks have one sample more
        than the others; for validation always this one. ``"pad"``: all ranks have as many as the largest, and the first samples of the
        order come again. ``"drop"``: all have as many as the smallest, and the last samples of the order are left out.
    shuffle
        False for the order 0, 1, 2, ... in every epoch.
    start
        The number of samples of the epoch that all ranks together have used already: the rest is divided. From ``n`` on there is none.

    Returns
    -------
    ndarray
        int64, shape ``(k,)``; the k of two ranks differ by at most one, and with ``"pad"`` and ``"drop"`` not at all.

    Raises
    ------
    UsageError
        A number is negative or not whole, or ``uneven`` is none of these.
    """
    share = _Share(n, group, seed, uneven, shuffle)
    return share.indices(_whole("epoch", epoch), _whole("start", start))


class Sampler:
    """Divides a data set into batches, epoch by epoch: the same number of batches on every rank, so that their collectives match.

    >>> sampler = mp.Sampler(len(images), group, batch_size=32)
    >>> for epoch in range(sampler.epoch_number, 10):
    ...     for indices in sampler.epoch(epoch):
    ...         gradients = sync(backward(images[indices]), weight=len(indices))

    If a rank has fewer samples than others, its last batch is smaller, and may be empty: give the number of its samples as the weight.
    `shard_indices` says which samples they are.

    A loader that fetches batches ahead, such as a ``DataLoader`` with workers, takes them from the sampler before they are used. Iterate over
    `following` then, so that `state` knows which were used:

    >>> loader = DataLoader(data, batch_sampler=sampler.epoch(epoch), num_workers=2)
    >>> for batch in sampler.following(loader):
    ...     ...

    Parameters
    ----------
    n
        The number of samples.
    group
        A `Group`, or any object with a ``rank`` and a ``world_size``.
    batch_size
        The samples of a batch on one rank.
    seed, uneven, shuffle
        As for `shard_indices`.

    Attributes
    ----------
    batch_size
        The samples of a batch on one rank.
    epoch_number
        The epoch of the last batch that was given out, with `following` used, or of the state that was loaded.
    start
        How many samples of this epoch all ranks together have been given, with `following` used.

    Raises
    ------
    UsageError
        As for `shard_indices`; or ``batch_size`` is not positive.
    """

    def __init__(
        self, n: int, group: Ranked, batch_size: int, *, seed: int = 0, uneven: str = "keep", shuffle: bool = True
    ) -> None:
        self._share = _Share(n, group, seed, uneven, shuffle)
        self.batch_size: int = _whole("batch_size", batch_size, least=1)
        self.epoch_number: int = 0
        self.start: int = 0
        self._loaded = False
        self._follower: object | None = None  # the loop that says which batches are used
        self._source: object | None = None  # the run whose batches it gets, as long as that has some left
        self._ahead: deque[tuple[int, int]] = deque()  # the position of the sampler after each batch that is not used yet
        self._thread: int | None = None  # that has taken the last batch
        self._doubt = ""  # why it is not known which batches were used

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self._batches(0)

    def epoch(self, number: int, *, start: int | None = None) -> Iterator[Indices]:
        """Return the batches of an epoch, one after the other.

        Parameters
        ----------
        number
            The number of the epoch, from 0 on.
        start
            The number of its samples that all ranks together have used already. By default, the first time after `load_state`, the number in the
            state of this epoch, and otherwise 0.

        Returns
        -------
        iterator of ndarray
            int64, shape ``(k,)`` with k up to the size of a batch; as many on every rank.

        Raises
        ------
        UsageError
            A number is negative or not whole.
        """
        number = _whole("number", number)
        if start is None:
            start = self.start if self._loaded and number == self.epoch_number else 0
        start = _whole("start", start)
        self._loaded = False
        return self._run(number, start)

    def _run(self, number: int, start: int) -> Iterator[Indices]:
        mine = self._share.indices(number, start)
        size, ranks = self.batch_size, self._share.world_size
        last = self._batches(start) - 1
        me = object()
        follower: object | None = None  # the loop in which this run began
        for batch in range(last + 1):
            # Counted before it is yielded: a save in the body of the loop has used this batch. Nothing is left after the last one.
            place = number, start + (batch + 1) * size * ranks if batch < last else self._share.n
            if not batch:
                follower = self._follower
            if self._follower is not None:
                if self._follower is not follower:
                    raise UsageError(
                        "the loader has taken batches before following() began, so it is unknown which of them were used: give following() the "
                        "loader, and not an iterator that has begun"
                    )
                if self._source not in (None, me):
                    raise UsageError(
                        "a following() loop of this sampler still uses the batches of another epoch(), and could not distinguish them from these: leave it "
                        "first, or use another sampler for these"
                    )
                self._source = me if batch < last else None
                self._ahead.append(place)
            elif follower is not None:
                self._doubt = "the loop of following() was left, but its loader continues"
            else:
                self.epoch_number, self.start = place
                self._doubt = _prefetcher(sys._getframe(1))
                self._thread = threading.get_ident()
            yield mine[batch * size : (batch + 1) * size]

    def following(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield a loader's results for the batches of `epoch`, one for each, and count those that come out as used.

        Parameters
        ----------
        batches
            A loader that takes the batches of an `epoch` of this sampler, in their order, as far ahead as it likes. Give it before it is
            iterated over: ``sampler.following(loader)``.

        Yields
        ------
        object
            The items of the loader.

        Raises
        ------
        UsageError
            The loader has begun before, or gives more than it has taken from this sampler, or another `following` loop is not over. As long as
            this one is not over and its epoch has batches left, another `epoch` of this sampler raises it as well.
        """
        if self._follower is not None:
            raise UsageError(
                "another following() loop of this sampler is not over; leave it first: each loader has a sampler of its own"
            )
        self._follower = object()
        has_given = False
        try:
            for item in batches:
                if not self._ahead:
                    raise UsageError(
                        "the loader gave a batch that it has not taken from this sampler within following(): give it batches of "
                        "sampler.epoch(...), one for one, and do not begin to iterate over it before"
                    )
                self.epoch_number, self.start = self._ahead.popleft()
                self._doubt = ""
                self._thread = threading.get_ident()
                has_given = True
                yield item
        finally:
            self._follower = self._source = None
            self._ahead.clear()
            if has_given:
                self._thread = None  # no loop is at work on the last batch

    def _batches(self, start: int) -> int:
        samples = self._share.stop(start) - start
        return -(-samples // (self.batch_size * self._share.world_size))

    def state(self) -> dict[str, Indices]:
        """Return the position of the sampler, for a checkpoint: after the last batch that it gave out, or that `following` did.

        Returns
        -------
        dict of ndarray
            int64 numbers, the same on all ranks: ``epoch``, ``start``, ``n``, ``seed``, ``shuffle``.

        Raises
        ------
        UsageError
            Batches were taken ahead, by workers of a ``DataLoader`` or in another thread, and not through `following`, so that it is unknown
            which were used. Or a `following` loop runs in another thread.
        """
        doubt = self._doubt
        if not doubt and self._thread not in (None, threading.get_ident()):
            doubt = "another thread has taken the last batch"
        if doubt:
            raise UsageError(
                f"which batches were used is not known, since {doubt}, maybe ahead of their use: iterate over sampler.following(loader), "
                "and call state() in that loop"
            )
        return self._state()

    def _state(self) -> dict[str, Indices]:
        share = self._share
        numbers = {"epoch": self.epoch_number, "start": self.start, "n": share.n, "seed": share.seed, "shuffle": share.shuffle}
        return {name: np.array(number, np.int64) for name, number in numbers.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another sampler; the number of ranks, the size of a batch and ``uneven`` may be others.

        Parameters
        ----------
        state
            The result of its `state`.

        Raises
        ------
        UsageError
            The state is of other samples or of another order: ``n``, ``seed`` or ``shuffle`` differs, or an entry is missing. The sampler
            stays as it was.
        """
        mine = self._state()
        missing = sorted(set(mine) - set(state))
        if missing:
            raise UsageError(f"the state of a sampler has no {', '.join(missing)}; give what Sampler.state() returned")
        for name in ("n", "seed", "shuffle"):
            if int(state[name]) != int(mine[name]):
                raise UsageError(
                    f"the state is of a sampler with {name}={int(state[name])}, and this one has {name}={int(mine[name])}: "
                    "its samples would come in another order; make the sampler with the same n, seed and shuffle"
                )
        number, start = _whole("epoch", state["epoch"]), _whole("start", state["start"])
        self.epoch_number, self.start, self._loaded = number, start, True
        self._doubt, self._thread = "", None


class _Share:
    """The division of samples: the common part of `shard_indices` and `Sampler`."""

    def __init__(self, n: int, group: Ranked, seed: int, uneven: str, shuffle: bool) -> None:
        self.n = _whole("n", n)
        self.seed = _whole("seed", seed)
        if uneven not in _MODES:
            raise UsageError(f"uneven must be one of {', '.join(map(repr, _MODES))}, not {uneven!r}")
        self.uneven = uneven
        self.shuffle = bool(shuffle)
        self.rank, self.world_size = group.rank, group.world_size

    def stop(self, start: int) -> int:
        """Return the place after the last sample: beyond ``n``, the order begins again. Not above ``start`` if nothing is left."""
        if self.uneven == "keep":
            return self.n
        rest, ranks = self.n - start, self.world_size
        return start + (-(-rest // ranks) if self.uneven == "pad" else rest // ranks) * ranks

    def indices(self, epoch: int, start: int) -> Indices:
        """Return the samples of this rank from ``start`` on."""
        places = np.arange(start + self.rank, self.stop(start), self.world_size, dtype=np.int64)
        if not places.size:
            return places
        places %= self.n
        if not self.shuffle:
            return places
        order: Indices = np.random.default_rng((self.seed, epoch)).permutation(self.n)
        return order[places]


def _prefetcher(frame: FrameType | None) -> str:
    """Return words for the loader that takes batches ahead, if the loader that takes a batch is known to: a DataLoader of torch with workers."""
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_globals.get("__name__", "").startswith("torch.utils.data"):
            workers = getattr(frame.f_locals.get("self"), "_num_workers", None)
            if workers:
                return f"a DataLoader with num_workers={workers} has taken them"
        frame = frame.f_back
    return ""


def _whole(name: str, value: SupportsIndex, least: int = 0) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number < 1 << 63:
        raise UsageError(f"{name} must be a whole number from {least} on, below 2**63, not {value!r}")
    return number
