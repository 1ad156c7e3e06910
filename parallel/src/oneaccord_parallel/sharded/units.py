"""Units: the parameters that are gathered and reduced together, in one flat buffer for each dtype."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import array_api_compat
import numpy as np

from oneaccord import Work
from oneaccord.errors import DTypeError, SizeMismatchError, UsageError
from oneaccord_parallel import trees
from oneaccord_parallel.arrays import (
    Array,
    dtype_of,
    itemsize,
    namespace,
    need_plain,
    readable,
    same_place,
    shape_of,
)
from oneaccord_parallel.layout import Layout, by_dtype
from oneaccord_parallel.overlaps import is_repeated

__all__ = ["Part", "Unit", "check", "check_dtypes", "checked", "divide", "find"]


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
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The optimizer's state of each parameter, for the elements that are in the shard."""
    counted: dict[tuple[str, str], Any] = field(default_factory=dict)


@dataclass(eq=False)
class Unit:
    """Parameters with a name.

    ``relative`` has for each leaf, by its full name, the name within the unit. ``spec`` is that of the unit's subtree; None if it is not
    one, as in a flat dict: then it is shown as a dict of relative names. ``tied`` has the first name of each leaf that is there under another
    one. An array that belongs to several units is a part of each of them.
    """

    name: str
    relative: dict[str, str]
    tied: dict[str, str]
    spec: trees.Spec | None
    parts: list[Part]
    users: int = 0
    leaves: dict[str, Array] | None = None

    def tree(self, leaves: Mapping[str, Array]) -> Any:
        """Return leaves, by full names, as the tree that a program sees."""
        shown = {short: leaves[self.tied.get(name, name)] for name, short in self.relative.items()}
        return shown if self.spec is None else trees.rebuild(self.spec, shown)

    def gradients(self, tree: Any, dtypes: Iterable[str | None]) -> dict[str, list[Array]]:
        """Return the gradients of a tree, checked: for each parameter that has any, by its first name, those of all its places.

        Memory at several of them is the sum already, and there once.

        Raises
        ------
        UsageError
            The names, a shape or a dtype is not that of the unit's parameters.
        """
        given, missing, unknown = trees.partly_named(
            tree, self.relative.values(), lambda: self.tree(dict.fromkeys([*self.relative, *self.tied.values()], 0))
        )
        if missing or unknown:
            raise UsageError(
                f"the gradients of the unit {self.name!r} must be {sorted(self.relative.values())}: missing are {missing or 'none'}, "
                f"unknown are {unknown or 'none'}; give None for a parameter without a gradient: one that has none on any rank is not updated"
            )
        homes = {slot.name: (slot, part) for part in self.parts for slot in part.layout.slots}
        found: dict[str, list[Array]] = {}
        for name, short in self.relative.items():
            if short in given:
                slot, part = homes[self.tied.get(name, name)]
                check(name, given[short], slot.shape, {part.layout.dtype, *dtypes} - {None})
                places = found.setdefault(slot.name, [])
                if not is_repeated(given[short], places):
                    places.append(given[short])
        return found


def check(name: str, gradient: Array, shape: tuple[int, ...], dtypes: Iterable[Any]) -> None:
    """Refuse a gradient that does not fit its parameter."""
    readable(gradient)
    if shape_of(gradient) != shape:
        raise SizeMismatchError(f"the gradient of {name!r} has shape {shape_of(gradient)}, and the parameter has {shape}")
    if dtype_of(gradient) not in set(dtypes):
        raise DTypeError(
            f"the gradient of {name!r} has dtype {dtype_of(gradient)}, but must have {' or '.join(sorted(dtypes))}"
        )


def checked(params: Any, what: str) -> tuple[dict[str, Array], trees.Spec]:
    """Return the parameters by name, for a class with a name.

    Raises
    ------
    UsageError
        There are none.
    DTypeError
        A leaf is no array of floating-point numbers, or they are of several libraries.
    """
    leaves, spec = trees.flatten(params)
    if not leaves:
        raise UsageError("there are no parameters: the tree has no leaves")
    _check_leaves(leaves, what)
    return leaves, spec


def divide(
    leaves: Mapping[str, Array], spec: trees.Spec, units: Sequence[str] | None, parts: int, tied: Mapping[str, str]
) -> list[Unit]:
    """Divide the parameters into units.

    Parameters
    ----------
    leaves, spec
        The parameters by name, and the tree of them.
    units
        Prefixes of their names, each of whole components. Of several that fit, the longest has the leaf. By default the first component of
        each name.
    parts
        The number of shards.
    tied
        The names of arrays that have been there before, and their first names.

    Raises
    ------
    UsageError
        A leaf belongs to no unit, or a unit has no leaf.
    """
    if isinstance(units, str):
        raise UsageError(f"units must be a list of prefixes, such as [{units!r}], not a string")
    prefixes = list(dict.fromkeys(name.split(".")[0] for name in leaves)) if units is None else list(units)
    if len(set(prefixes)) < len(prefixes):
        raise UsageError(f"each unit must be given only once, not as in {prefixes}")
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
    homes: dict[str, set[str]] = {}  # the units of each array
    for prefix, names in members.items():
        for name in names:
            homes.setdefault(tied.get(name, name), set()).add(prefix)
    shared = {name: _parts({name: leaves[name]}, parts)[0] for name, where in homes.items() if len(where) > 1}
    found = []
    for prefix, names in members.items():
        firsts = dict.fromkeys(tied.get(name, name) for name in names)
        own = _parts({name: leaves[name] for name in firsts if name not in shared}, parts)
        subtree = subtrees.get(prefix)
        if subtree is not None and subtree.num_leaves != len(names):
            subtree = None
        relative = {name: name[len(prefix) :].removeprefix(".") for name in names}
        aliases = {name: tied[name] for name in names if name in tied}
        found.append(Unit(prefix, relative, aliases, subtree, [*own, *(shared[name] for name in firsts if name in shared)]))
    return found


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
    """Raise an error for a value that is not the name of a dtype of floating-point numbers."""
    for dtype in dtypes:
        if dtype is not None and not (_is_float(dtype) and itemsize(dtype)):
            raise UsageError(f'a dtype must be given by name, such as "bfloat16", not {dtype!r}')


def _is_float(dtype: str) -> bool:
    """Return whether a dtype is one of floating-point numbers."""
    return dtype.startswith(("float", "bfloat"))


def _parts(leaves: Mapping[str, Array], parts: int) -> list[Part]:
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
    return found


def _prefixes(name: str) -> Iterator[str]:
    """Yield the prefixes of whole components that a name has, the longest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _check_leaves(leaves: Mapping[str, Any], what: str) -> None:
    """Raise an error for leaves that cannot be trained or divided: leaves other than arrays of floats, and arrays of several libraries or memories."""
    need_plain(what, leaves)
    first_name, first = next(iter(leaves.items()))
    for name, leaf in leaves.items():
        readable(leaf)
        if not hasattr(leaf, "dtype") or not _is_float(dtype_of(leaf)):
            dtype = dtype_of(leaf) if hasattr(leaf, "dtype") else type(leaf).__name__
            raise DTypeError(
                f"parameters must be arrays of floating-point numbers, but {name!r} is of {dtype}; keep it elsewhere"
            )
        if not same_place(leaf, first) or namespace(leaf) is not namespace(first):
            raise DTypeError(
                f"all parameters must be arrays of one library in one place: {first_name!r} is a {type(first).__name__}, and {name!r} a "
                f"{type(leaf).__name__}"
            )
