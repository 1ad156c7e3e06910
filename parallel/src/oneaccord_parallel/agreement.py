"""Whether all ranks have given the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oneaccord import Group
from oneaccord.errors import UsageError
from oneaccord_parallel.arrays import dtype_of, oddity, shape_of

__all__ = ["checked_weight", "difference", "need_group", "same_on_all", "stories"]

_TOLD = 5
"""The most differences that a message shows one by one."""
_LONGEST_STORY = 200


def stories(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return dtype and shape of each leaf in words, such as ``float32[3, 4]``; for a value that is not an array its type, and any fault of an array."""
    return {
        name: oddity(leaf) or (f"{dtype_of(leaf)}{list(shape_of(leaf))}" if hasattr(leaf, "dtype") else type(leaf).__name__)
        for name, leaf in leaves.items()
    }


def same_on_all(group: Group, what: str, mine: Mapping[str, str], *, timeout_s: float | None = None) -> None:
    """Compare the values that the ranks give under each name, in order. It costs one exchange of 16 bytes; only a difference costs more.

    Parameters
    ----------
    group
        Every rank of it must call this.
    what
        The name of the caller, for the message: ``"GradientSync"``.
    mine
        The value of this rank.
    timeout_s
        Seconds that each exchange may last.

    Raises
    ------
    UsageError
        The ranks differ, and the message says how. Every rank raises it, and the group stays usable.
    """
    need_group(group)
    if group.world_size == 1:
        return
    text = "\n".join(f"{name}\0{story}" for name, story in mine.items())
    digest = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.uint8)
    found = np.asarray(group.all_gather(digest, timeout_s=timeout_s)).reshape(group.world_size, -1)
    if (found == digest).all():
        return
    everyone = group.all_gather_object(list(mine.items()), type=list[tuple[str, str]], timeout_s=timeout_s)
    raise UsageError(difference(what, group.ranks, [dict(each) for each in everyone]), rank=group.rank)


def difference(what: str, ranks: Sequence[int], given: Sequence[Mapping[str, str]]) -> str:
    """Return the message of `same_on_all` about the values of some ranks."""
    told = _differences(ranks, given)
    if len(told) > _TOLD:
        told[_TOLD:] = [f"and {len(told) - _TOLD} more"]
    lines = "".join(f"\n  {line}" for line in told)
    return f"{what} needs the same on every rank, but the ranks differ:{lines}"


def need_group(group: Any) -> None:
    """Raise an error for an object that is not a group, before it is used as one."""
    if not isinstance(group, Group):
        raise UsageError(f"expected a Group, such as oa.init() returns, not a {type(group).__name__}: {group!r:.80}")


def checked_weight(weight: Any) -> float:
    """Return the weight of a rank's gradients.

    Raises
    ------
    UsageError
        It is no number, or not finite, or negative.
    """
    try:
        number = math.nan if isinstance(weight, str | bytes) else float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(f"a weight must be a finite number that is not negative, such as a number of samples, not {weight!r}")
    return number


def _differences(ranks: Sequence[int], given: Sequence[Mapping[str, str]]) -> list[str]:
    told = []
    names = list(dict.fromkeys(name for each in given for name in each))
    for name in names:
        said: dict[str, list[int]] = {}
        for rank, each in zip(ranks, given, strict=True):
            said.setdefault(each.get(name, "missing"), []).append(rank)
        if len(said) > 1:
            told.append(
                f"{name or 'the only leaf'}: " + "; ".join(f"{_short(story)} {_on(who)}" for story, who in said.items())
            )
    if not told:
        for place, _ in enumerate(names):
            said = {}
            for rank, each in zip(ranks, given, strict=True):
                said.setdefault(list(each)[place], []).append(rank)
            if len(said) > 1:
                told.append(f"number {place} in the order: " + "; ".join(f"{name} {_on(who)}" for name, who in said.items()))
    return told


def _short(story: str) -> str:
    return story if len(story) <= _LONGEST_STORY else story[: _LONGEST_STORY - 3] + "..."


def _on(ranks: list[int]) -> str:
    return f"on rank {ranks[0]}" if len(ranks) == 1 else f"on ranks {', '.join(map(str, ranks))}"
