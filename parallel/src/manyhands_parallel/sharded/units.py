"""Units: the parameters that are gathered and reduced together, in one flat buffer for each dtype."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import array_api_compat
import numpy as np

from manyhands import Work
from manyhands.errors import DTypeError, SizeMismatchError, UsageError
from manyhands_parallel import trees
from manyhands_parallel.arrays import (
    Array,
    dtype_of,
    itemsize,
    namespace,
    need_plain,
    readable,
    same_place,
    shape_of,
)
from manyhands_parallel.layout import Layout, by_dtype
from manyhands_parallel.overlaps import sharing

__all__ = ["Part", "Unit", "check", "check_dtypes", "divide", "find"]


@dataclass(eq=False)
class Part:
    """The parameters of a unit that have one dtype.

    ``shard`` is this rank's part of the flat buffer, padding included; ``whole`` is all of it, on ranks that keep it; ``gathered`` is what a
    step has gathered.
    """

    layout: Layout
    template: Array
    shard: Array = None
    whole: Array = None
    gathered: Array = None
    gradient: Array = None
    pending: Work[Array] | None = None
    state: dict[str, Any] = field(default_factory=dict)
    counted: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, dict[str, Array]] = field(default_factory=dict)
    """What the optimizer counts, an array of shape () for each parameter: a checkpoint may bring them from other units."""


@dataclass(eq=False)
class Unit:
    """Parameters with a name.

    ``relative`` has for each leaf, by its full name, the name within the unit. ``spec`` is that of the subtree that the unit is; None where it is
    none, as in a flat dict: then it is shown as a dict of relative names.
    """

    name: str
    relative: dict[str, str]
    spec: trees.Spec | None
    parts: list[Part]
    users: int = 0
    leaves: dict[str, Array] | None = None

    def tree(self, leaves: Mapping[str, Array]) -> Any:
        """Return leaves, by full names, as the tree that a program sees."""
        if self.spec is not None:
            return trees.rebuild(self.spec, {name: leaves[name] for name in self.relative})
        return {short: leaves[name] for name, short in self.relative.items()}

    def names(self, tree: Any, dtypes: Iterable[str | None]) -> dict[str, Array]:
        """Return the gradients of a tree by full name, checked.

        Raises
        ------
        UsageError
            The names, a shape or a dtype is not that of the unit's parameters.
        """
        given = trees.named(tree)
        if set(given) != set(self.relative.values()):
            missing, extra = sorted(set(self.relative.values()) - set(given)), sorted(set(given) - set(self.relative.values()))
            raise UsageError(
                f"the gradients of the unit {self.name!r} must be {sorted(self.relative.values())}: missing are {missing or 'none'}, "
                f"unknown are {extra or 'none'}; give zeros for a parameter without a gradient"
            )
        for part in self.parts:
            for slot in part.layout.slots:
                check(slot.name, given[self.relative[slot.name]], slot.shape, {part.layout.dtype, *dtypes} - {None})
        return {name: given[short] for name, short in self.relative.items()}


def check(name: str, gradient: Array, shape: tuple[int, ...], dtypes: Iterable[Any]) -> None:
    """Refuse a gradient that does not fit its parameter."""
    readable(gradient)
    if shape_of(gradient) != shape:
        raise SizeMismatchError(f"the gradient of {name!r} has shape {shape_of(gradient)}, and the parameter has {shape}")
    if dtype_of(gradient) not in set(dtypes):
        raise DTypeError(
            f"the gradient of {name!r} has dtype {dtype_of(gradient)}, and must have {' or '.join(sorted(dtypes))}"
        )


def divide(params: Any, units: Sequence[str] | None, parts: int) -> tuple[list[Unit], trees.Spec]:
    """Divide the parameters into units.

    Parameters
    ----------
    params
        A tree of arrays.
    units
        Prefixes of their names, each of whole components. Of several that fit, the longest has the leaf. By default the first component of
        each name.
    parts
        The number of shards.

    Raises
    ------
    UsageError
        A leaf belongs to no unit, or a unit has no leaf.
    DTypeError
        A leaf is no array of floating-point numbers, or they are of several libraries.
    """
    leaves, spec = trees.flatten(params)
    if not leaves:
        raise UsageError("there are no parameters: the tree has no leaves")
    _check_leaves(leaves)
    if isinstance(units, str):
        raise UsageError(f"units is a list of prefixes, such as [{units!r}], and a string was given")
    prefixes = list(dict.fromkeys(name.split(".")[0] for name in leaves)) if units is None else list(units)
    if len(set(prefixes)) < len(prefixes):
        raise UsageError(f"each unit is given once, and these are {prefixes}")
    members: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for name in leaves:
        prefix = next((prefix for prefix in _prefixes(name) if prefix in members), None)
        if prefix is None:
            raise UsageError(f"the parameter {name!r} belongs to none of the units {prefixes}")
        members[prefix].append(name)
    empty = [prefix for prefix, names in members.items() if not names]
    if empty:
        raise UsageError(f"the units {empty} have no parameters of their own; the parameters are {sorted(leaves)}")
    subtrees = trees.below(spec, prefixes)
    return [
        _unit(prefix, {name: leaves[name] for name in names}, subtrees.get(prefix), parts) for prefix, names in members.items()
    ], spec


def find(units: Mapping[str, Unit], name: str) -> Unit:
    """Return a unit by its name.

    Raises
    ------
    UsageError
        There is none.
    """
    if name in units:
        return units[name]
    near = difflib.get_close_matches(str(name), units, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UsageError(f"there is no unit {name!r}{hint}: the units are {list(units)}")


def check_dtypes(*dtypes: str | None) -> None:
    """Refuse what is no dtype of floating-point numbers, by name."""
    for dtype in dtypes:
        if dtype is not None and not (_is_float(dtype) and itemsize(dtype)):
            raise UsageError(f'a dtype is given by name, such as "bfloat16", and {dtype!r} was given')


def _is_float(dtype: str) -> bool:
    """Return whether a dtype is one of floating-point numbers."""
    return dtype.startswith(("float", "bfloat"))


def _unit(prefix: str, leaves: Mapping[str, Array], subtree: trees.Spec | None, parts: int) -> Unit:
    relative = {name: name[len(prefix) :].removeprefix(".") for name in leaves}
    if subtree is not None and subtree.num_leaves != len(leaves):
        subtree = None
    found = []
    for some in by_dtype(leaves):
        leaf = next(iter(some.values()))
        # Only the kind of the array is kept, and not the caller's memory.
        template = (
            np.empty(0, leaf.dtype)
            if isinstance(leaf, np.ndarray)
            else namespace(leaf).empty(0, dtype=leaf.dtype, device=array_api_compat.device(leaf))
        )
        found.append(Part(Layout.of(some, parts), template))
    return Unit(prefix, relative, subtree, found)


def _prefixes(name: str) -> Iterator[str]:
    """Yield the prefixes of whole components that a name has, the longest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _check_leaves(leaves: Mapping[str, Any]) -> None:
    """Refuse what cannot be divided, such as one array in two places: what an update makes of each of its shards would differ."""
    need_plain("Sharded", leaves)
    first_name, first = next(iter(leaves.items()))
    for name, leaf in leaves.items():
        readable(leaf)
        if not hasattr(leaf, "dtype") or not _is_float(dtype_of(leaf)):
            dtype = dtype_of(leaf) if hasattr(leaf, "dtype") else type(leaf).__name__
            raise DTypeError(f"parameters are arrays of floating-point numbers, and {name!r} is of {dtype}; keep it elsewhere")
        if not same_place(leaf, first) or namespace(leaf) is not namespace(first):
            raise DTypeError(
                f"all parameters must be arrays of one library in one place: {first_name!r} is a {type(first).__name__}, and {name!r} a "
                f"{type(leaf).__name__}"
            )
    tied = sharing(leaves)
    if tied is not None:
        raise UsageError(
            f"the parameters {tied[0]!r} and {tied[1]!r} share memory, and would come apart: give one of them, use it in both places, and add up its "
            "gradients"
        )
