"""Metadata of checkpoints that somebody has changed, with the right checksum, and what may be loaded of them."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import oneaccord_parallel as mp
from oneaccord_parallel.checkpoint.errors import CheckpointError
from oneaccord_parallel.checkpoint.metadata import Metadata, _begin

__all__ = ["body_of", "changed", "forge", "look", "save_some", "sealed"]

_OTHER: list[Any] = [
    None,
    True,
    "",
    "a",
    "float64",
    "int8",
    "object",
    "$int",
    {},
    [],
    [0],
    {"$dict": []},
    -1,
    0,
    1,
    8,
    24,
    2**60,
    2**70,
    1.5,
    "../x",
]


def save_some(path: Path) -> None:
    """Save a checkpoint with arrays in one and in several pieces, without bytes and without axes, and with values."""
    whole = np.arange(1, 25, dtype="i2").reshape(4, 6)
    pieces = [((0, 0), whole[:2]), ((2, 0), whole[2:, :3].copy()), ((2, 3), whole[2:, 3:].copy())]
    tree = {
        "a": np.arange(1.0, 9.0),
        "b": mp.ShardedArray((4, 6), pieces),
        "c": {"d": np.zeros((0, 3)), "e": np.array(7, "u1")},
    }
    mp.save(tree | {"v": [3, 1.5, 1j, b"x", "y", float("inf")]}, path, step=1, extra={"n": [1, {2: None}], "big": 1 << 80})


def body_of(path: Path) -> Any:
    """Return what ``metadata.json`` says."""
    body = json.loads((path / "metadata.json").read_bytes())
    for key in ("format", "version", "crc32"):
        del body[key]
    return body


def sealed(body: bytes) -> bytes:
    """Return the content of ``metadata.json``, of its fields without the first brace."""
    return _begin(f"{zlib.crc32(_begin('') + body):08x}") + body


def forge(path: Path, change: Callable[[Any], object]) -> None:
    """Change what ``metadata.json`` says, in place, or make it the bytes that ``change`` returns."""
    body = body_of(path)
    told = change(body)
    text = told if isinstance(told, bytes) else json.dumps(body, separators=(",", ":")).encode()
    (path / "metadata.json").write_bytes(sealed(text[1:]))


def _nodes(value: Any) -> Iterator[Any]:
    """Yield each list and dict with anything in it."""
    if isinstance(value, list | dict) and value:
        yield value
        for each in value if isinstance(value, list) else value.values():
            yield from _nodes(each)


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield what is in nested dicts; of a path of many keys there are many."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            left += node.values()
        else:
            yield node


def changed(body: Any, chance: random.Random) -> Any:
    """Change what metadata say, in one to three places: another value, a near one, one from elsewhere, one lost, one doubled."""
    for _ in range(chance.randint(1, 3)):
        nodes = list(_nodes(body))
        node, other = chance.choice(nodes), chance.choice(nodes)
        key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        how = chance.random()
        if how < 0.1:
            del node[key]
        elif how < 0.5 and type(node[key]) is int:
            node[key] += chance.choice([-8, -2, -1, 1, 2, 8, chance.randint(-600, 600)])
        elif how < 0.7:
            node[key] = copy.deepcopy(chance.choice(list(other.values()) if isinstance(other, dict) else other))
        elif how < 0.8 and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        else:
            node[key] = copy.deepcopy(chance.choice(_OTHER))
    return body


def look(path: Path, content: bytes) -> None:
    """Load a checkpoint whose metadata have this content: that raises a CheckpointError, or each element comes from a file."""
    try:
        found = mp.load(path)
    except CheckpointError:
        return
    got = sorted((str(x.dtype), x.shape, x.tobytes()) for x in _leaves(found) if isinstance(x, np.ndarray))
    assert got == sorted(_of_files(path, content).values())


def _of_files(path: Path, data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of each array, copied piece for piece from the files; each element must be in exactly one piece."""
    metadata = msgspec.json.decode(data, type=Metadata)
    found = {}
    for name, array in metadata.arrays.items():
        width = {"bfloat16": 2}.get(array.dtype) or (1 if array.dtype.startswith("float8") else np.dtype(array.dtype).itemsize)
        content, count = np.zeros((*array.shape, width), "u1"), np.zeros(array.shape, int)
        for chunk in filter(lambda chunk: chunk.box.size, array.chunks):
            content[chunk.box.slices] = np.fromfile(
                path / chunk.file, "u1", chunk.box.size * width, offset=chunk.start
            ).reshape(*chunk.shape, width)
            count[chunk.box.slices] += 1
        assert (count == 1).all(), name
        found[name] = (array.dtype, array.shape, content.tobytes())
    return found
