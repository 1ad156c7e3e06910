"""The plan of a save: the data, and which rank writes which part."""

from __future__ import annotations

import hashlib
import operator
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from oneaccord.errors import UsageError
from oneaccord_parallel.agreement import difference
from oneaccord_parallel.arrays import Array, dtype_of, itemsize, shape_of
from oneaccord_parallel.boxes import Box, boxes_of_range, whole
from oneaccord_parallel.checkpoint import storage
from oneaccord_parallel.checkpoint.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointWriteError
from oneaccord_parallel.checkpoint.host import cut, fingerprint, source
from oneaccord_parallel.checkpoint.metadata import BLOCK_BYTES, Stamp, parse, to_json
from oneaccord_parallel.checkpoint.ranks import Failure, Ranks
from oneaccord_parallel.checkpoint.safetensors import check_dtype
from oneaccord_parallel.checkpoint.tiling import find_fault, tile
from oneaccord_parallel.sharded_arrays import Distributed, PerRank, ShardedArray
from oneaccord_parallel.trees import flatten

__all__ = ["Leaf", "Part", "Plan", "is_value", "make_plan", "own_name"]


@dataclass(frozen=True)
class Leaf:
    """A leaf of the tree on this rank.

    Attributes
    ----------
    name, path
        Its name, and the keys that lead to it.
    dtype, shape
        Of the whole array; of a value None and ().
    pieces
        Of a sharded array the pieces of this rank; of an array that all ranks have, the whole.
    is_sharded
        Whether other ranks have other pieces.
    value
        A Python value, as JSON.
    """

    name: str
    path: tuple[int | str, ...]
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    pieces: Mapping[Box, Array] = field(default_factory=dict)
    is_sharded: bool = False
    value: Any = None

    def __str__(self) -> str:
        if self.dtype is None:
            return f"the value {msgspec.json.encode(self.value).decode()}"
        return f"{'a sharded' if self.is_sharded else 'an'} array of {self.dtype}, shape {self.shape}"


@dataclass(frozen=True)
class Part:
    """The data that this rank writes: a box of a leaf."""

    leaf: Leaf
    box: Box
    array: Array

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.box.size * itemsize(str(self.leaf.dtype))


@dataclass(frozen=True)
class Plan:
    """One save: the same on all ranks, but for ``parts``."""

    path: Path
    save: str
    step: int | None
    extra: Any
    leaves: list[Leaf]
    parts: list[Part]
    largest_bytes: int
    """The most that any rank writes."""


def is_value(leaf: Any) -> bool:
    """Return whether a leaf is a Python value, and no array."""
    return isinstance(leaf, bool | int | float | complex | str | bytes | bytearray) and not isinstance(leaf, np.generic)


def own_name(name: str, rank: int, inner: str) -> str:
    """Return the name in a checkpoint of a leaf that one rank has for itself."""
    return ".".join(part for part in (name, str(rank), inner) if part)


def make_plan(
    tree: Any, path: str | os.PathLike[str], ranks: Ranks, step: int | None, extra: Any, *, check: bool = True
) -> Plan:
    """Agree with the other ranks, in one collective; see `oneaccord_parallel.save` for the refused values.

    Rank 0 makes the folder, and removes the files of earlier saves there, before any rank writes.
    """
    folder = Path(path)
    leaves: list[Leaf] = []
    own: list[Leaf] = []
    same: dict[str, str] = {}
    failure: Failure | None = None
    mine: Exception | None = None
    try:
        step, extra = _checked_step(step), to_json(extra)
        leaves, own, bearers = _leaves(tree, ranks.rank)
        same = {"the path": os.fspath(path), "the step": str(step), "extra": msgspec.json.encode(extra).decode()}
        same |= {"check": str(bool(check))} | {f"leaf {leaf.name!r}": str(leaf) for leaf in leaves}
        same |= {f"leaf {name!r}": "a value of each rank" for name in bearers}
        if check and ranks.count > 1:
            same |= {
                f"the content of leaf {leaf.name!r}": _content(leaf) for leaf in leaves if leaf.dtype and not leaf.is_sharded
            }
        if ranks.rank == 0:
            _prepare(folder)
    except OSError as error:
        mine = CheckpointWriteError(f"cannot prepare {folder}: {error}", file=str(folder))
        mine.__cause__, failure = error, ranks.failure(mine)
    except Exception as error:  # noqa: BLE001 - it is raised on all ranks
        failure, mine = ranks.failure(error), error
    offers = ranks.all_gather(
        {
            "failure": failure,
            "save": secrets.token_hex(8) if ranks.rank == 0 else "",
            "digest": hashlib.sha256(msgspec.json.encode(list(same.items()))).hexdigest(),
            "pieces": {number: list(leaf.pieces) for number, leaf in enumerate(leaves) if leaf.is_sharded},
            "own": [(leaf.name, leaf.path, leaf.dtype, leaf.shape, leaf.value) for leaf in own],
        }
    )
    ranks.raise_first([offer["failure"] for offer in offers], mine)
    if len({offer["digest"] for offer in offers}) > 1:
        told = difference("save", range(ranks.count), ranks.all_gather(same))
        raise UsageError(
            f"{told}\nSave a value that each rank has for itself as mp.PerRank(value); make arrays equal on all ranks by mp.broadcast(tree, "
            "group)",
            rank=ranks.rank,
        )
    held = [
        {number: [Box(tuple(offset), tuple(shape)) for offset, shape in boxes] for number, boxes in offer["pieces"].items()}
        for offer in offers
    ]
    for rank, offer in enumerate(offers):
        for place, (name, keys, dtype, shape, value) in enumerate(offer["own"]):
            if rank == ranks.rank:
                leaf = own[place]
            else:
                leaf = Leaf(name, tuple(keys), dtype, tuple(shape), is_sharded=dtype is not None, value=value)
            if leaf.is_sharded:
                for holder, pieces in enumerate(held):
                    pieces[len(leaves)] = [whole(leaf.shape)] if holder == rank and whole(leaf.shape).size else []
            leaves.append(leaf)
    twice = [name for name, count in Counter(leaf.name for leaf in leaves).items() if count > 1]
    if twice:
        raise UsageError(
            f"two leaves have the name {twice[0]!r}: values of each rank have the number of the rank in their names; rename one of them",
            rank=ranks.rank,
        )
    tasks = _divide(leaves, held, ranks.rank)
    parts = [
        Part(leaves[number], box, cut(leaves[number].pieces[whole(leaves[number].shape)], box))
        if not leaves[number].is_sharded
        else Part(leaves[number], box, leaves[number].pieces[box])
        for number, box in tasks[ranks.rank]
    ]
    # So all begin at a multiple of their own size.
    parts.sort(key=lambda part: -itemsize(str(part.leaf.dtype)))
    largest = max(sum(box.size * itemsize(str(leaves[number].dtype)) for number, box in task) for task in tasks)
    return Plan(folder, offers[0]["save"], step, extra, leaves, parts, largest)


def _checked_step(step: Any) -> int | None:
    number = None if isinstance(step, bool) or not hasattr(step, "__index__") else operator.index(step)
    if step is not None and (number is None or number < 0):
        raise UsageError(f"step must be an integer of at least 0, not {step!r}")
    return number


def _leaves(tree: Any, rank: int) -> tuple[list[Leaf], list[Leaf], list[str]]:
    """Return the leaves that all ranks have, by sorted names, whatever the order of this rank's dicts; the leaves that this rank has
    for itself; and the names under which each rank has some.
    """
    leaves, spec = flatten(tree)
    found, own, bearers = [], [], []
    for (name, leaf), path in zip(leaves.items(), spec.paths(), strict=True):
        try:
            if not isinstance(leaf, PerRank):
                found.append(_leaf(name, _keys(path), leaf))
                continue
            bearers.append(name)
            inner, below = flatten(leaf.value)
            for (short, each), more in zip(inner.items(), below.paths(), strict=True):
                own.append(_own_leaf(own_name(name, rank, short), (*_keys(path), rank, *_keys(more)), each))
        except UsageError as error:
            raise type(error)(f"leaf {name!r}: {error}") from error
    return sorted(found, key=lambda leaf: leaf.name), own, sorted(bearers)


def _own_leaf(name: str, path: tuple[int | str, ...], leaf: Any) -> Leaf:
    """Return a leaf that this rank alone has."""
    if isinstance(leaf, ShardedArray | Distributed | PerRank):
        raise UsageError(f"the value of mp.PerRank may contain arrays and Python values, but not {type(leaf).__qualname__}")
    found = _leaf(name, path, leaf)
    if found.dtype is None:
        return found
    return replace(found, is_sharded=True, pieces={box: array for box, array in found.pieces.items() if box.size})


def _content(leaf: Leaf) -> str:
    """Return the facts about the bytes of an array that all ranks should have."""
    (array,) = leaf.pieces.values()
    return f"checksum {fingerprint(array)}"


def _leaf(name: str, path: tuple[int | str, ...], leaf: Any) -> Leaf:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"its name is not valid Unicode: {error}") from error
    if is_value(leaf):
        return Leaf(name, path, value=to_json(leaf))
    if isinstance(leaf, Distributed):
        leaf = leaf.sharded_array()
    if isinstance(leaf, ShardedArray):
        check_dtype(leaf.dtype)
        pieces = {box: source(array) for box, array in leaf.pieces if box.size}
        return Leaf(name, path, leaf.dtype, leaf.shape, pieces, is_sharded=True)
    array = source(leaf)
    check_dtype(dtype_of(array))
    return Leaf(name, path, dtype_of(array), shape_of(array), {whole(shape_of(array)): array})


def _keys(path: tuple[Any, ...]) -> tuple[int | str, ...]:
    return tuple(key if type(key) is int and abs(key) < 2**63 else str(key) for key in path)


def _prepare(folder: Path) -> None:
    """Make a folder ready: remove the files of killed saves, and check that the rest is ours."""
    storage.make_folder(folder)
    try:
        data = storage.read_metadata(folder)
        kept = parse(data, str(folder / storage.METADATA), Stamp).files if data is not None else {}
    except CheckpointCorruptError:
        return  # which files it meant is not known; they go once there is a new one
    except CheckpointFormatError as error:
        raise CheckpointFormatError(
            f"{error}. It is not replaced: choose another folder, or remove it", file=error.file
        ) from error
    storage.remove_others(folder, kept)


def _divide(leaves: list[Leaf], held: list[dict[int, list[Box]]], rank: int) -> list[list[tuple[int, Box]]]:
    """Return for each rank the boxes that it writes: each element of each array once, and about the same bytes on all ranks.

    Raises
    ------
    UsageError
        The pieces of a sharded array overlap in part, or do not fill it.
    """
    tasks: list[list[tuple[int, Box]]] = [[] for _ in held]
    loads = [0] * len(held)
    shared: list[tuple[int, Box, list[int]]] = []
    for number, leaf in enumerate(leaves):
        if not leaf.is_sharded:
            continue
        holders: dict[Box, list[int]] = {}
        for holder, pieces in enumerate(held):
            for box in pieces[number]:
                holders.setdefault(box, []).append(holder)
        if not tile(holders, leaf.shape):
            raise UsageError(f"leaf {leaf.name!r}: {_fault(holders, leaf.shape)}", rank=rank)
        shared += [(number, box, who) for box, who in holders.items()]
    # Those that only one rank can write come first.
    for number, box, who in sorted(shared, key=lambda item: len(item[2])):
        writer = min(who, key=lambda holder: loads[holder])
        tasks[writer].append((number, box))
        loads[writer] += box.size * itemsize(str(leaves[number].dtype))
    common = [(number, leaf) for number, leaf in enumerate(leaves) if leaf.dtype is not None and not leaf.is_sharded]
    total = sum(_nbytes(leaf) for _, leaf in common)
    rooms = _rooms(loads, total)
    for number, leaf in common:
        done, size, each = 0, whole(leaf.shape).size, itemsize(str(leaf.dtype))
        while True:
            writer, room = rooms[0]
            # Small ones are not cut.
            count = size - done if len(rooms) == 1 or _nbytes(leaf) <= BLOCK_BYTES else min(size - done, -(-room // each))
            if size:
                tasks[writer] += [(number, box) for box in boxes_of_range(leaf.shape, done, done + count)]
            else:
                tasks[writer].append((number, whole(leaf.shape)))
            done += count
            rooms[0] = (writer, room - count * each)
            if rooms[0][1] <= 0 and len(rooms) > 1:
                del rooms[0]
            if done == size:
                break
    return tasks


def _rooms(loads: list[int], total: int) -> list[tuple[int, int]]:
    """Return the ranks that write the arrays that all ranks have, and how many bytes each, so that all write as much in the end."""
    order = sorted(range(len(loads)), key=lambda rank: loads[rank])[: max(1, total // BLOCK_BYTES)]
    while (level := -(-(total + sum(loads[rank] for rank in order)) // len(order))) < loads[order[-1]]:
        order.pop()
    return [(rank, level - loads[rank]) for rank in order]


def _nbytes(leaf: Leaf) -> int:
    return whole(leaf.shape).size * itemsize(str(leaf.dtype))


def _fault(holders: Mapping[Box, list[int]], shape: tuple[int, ...]) -> str:
    fault = find_fault(list(holders), shape)
    if isinstance(fault, Box):
        return f"no rank holds the elements of shape {fault.shape} at {fault.offset}, of an array of shape {shape}"
    assert fault is not None
    one, other = (f"{box.shape} at {box.offset} on rank {holders[box][0]}" for box in fault)
    return f"the pieces {one} and {other} overlap in part; pieces must be the same or disjoint"
