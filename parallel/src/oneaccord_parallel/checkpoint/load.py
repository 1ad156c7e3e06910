"""Reading a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from oneaccord import Group
from oneaccord.errors import DTypeError, LayoutError, OutOfMemoryError, SizeMismatchError, UsageError
from oneaccord_parallel.arrays import Array, assignable, dtype_of, oddity, readable, shape_of, write
from oneaccord_parallel.arrays import like as as_in_library
from oneaccord_parallel.boxes import Box, whole
from oneaccord_parallel.checkpoint import safetensors, storage
from oneaccord_parallel.checkpoint.errors import CheckpointError, CheckpointMissingError
from oneaccord_parallel.checkpoint.host import Bits, as_bits, cut, empty, is_torch, new_array, torch_template
from oneaccord_parallel.checkpoint.metadata import (
    BLOCK_BYTES,
    Chunk,
    Metadata,
    StoredArray,
    StoredValue,
    from_json,
    parse,
)
from oneaccord_parallel.checkpoint.plan import is_value, own_name
from oneaccord_parallel.checkpoint.progress import progress_bar
from oneaccord_parallel.checkpoint.ranks import Ranks
from oneaccord_parallel.checkpoint.reading import File, Want
from oneaccord_parallel.sharded_arrays import Distributed, PerRank, ShardedArray
from oneaccord_parallel.trees import flatten, rebuild

__all__ = ["LoadReport", "load", "read_metadata"]

_RANK = re.compile("0|[1-9][0-9]{0,18}")


@dataclass
class LoadReport:
    """The work of `load` on this rank.

    Attributes
    ----------
    bytes_read
        The bytes of data that were read from files. Without ``verify=True`` these are no more than those of the arrays.
    kept
        With ``strict=False``: the leaves of ``like`` that the checkpoint does not have, and that are as they were.
    unused
        With ``strict=False``: the leaves of the checkpoint that ``like`` does not have.
    """

    bytes_read: int = 0
    kept: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    group: Group | None = None,
    *,
    strict: bool = True,
    verify: bool = False,
    progress: bool | None = None,
    report: LoadReport | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Load a tree that `save` has written. The ranks may be more or fewer, and may hold other pieces.

    Each rank reads the bytes that it needs, and no others. There are three collectives of small objects.

    Parameters
    ----------
    path
        The folder of a checkpoint, the same on all ranks. Or any file in safetensors format.
    like
        A tree with the names, shapes and dtypes of the arrays to load, as this rank wants them: plain arrays are loaded whole, of a
        `ShardedArray` or a `DTensor` its pieces, and of a `PerRank` the value that this rank has saved. Arrays that can be written get the new content in
        place: their old content is lost. None: all arrays, whole, as NumPy arrays, and all values, in nested dicts by the keys of the tree that was
        saved (a list has the keys 0, 1 ...). An empty dict in it takes the checkpoint's content there in the same way, such as the state of an
        optimizer of torch that has not made a step; as tensors on the CPU, if there is any tensor in ``like``.
    group
        The ranks that load; every one of them must call it. None for one process.
    strict
        Whether ``like`` and the checkpoint must have the same leaves, and as many ranks must load a `PerRank` as have saved it. If not, those
        that only one of them has stay as they are.
    verify
        Whether to read all blocks (1 MiB) that hold wanted bytes wholly, to compare them with their checksums. Otherwise only
        blocks that are read in one go anyway are compared: all, if ranks read what they have written.
    progress
        Whether rank 0 shows a progress bar; by default for 256 MiB or more on a terminal.
    report
        Called with a report of the work.
    timeout_s
        Seconds that each collective may wait for the other ranks; by default the group's, but ten minutes and more for ranks that read.

    Returns
    -------
    tree
        Like ``like``: with the same arrays, if they could be written. Those of JAX, and those that are read-only or repeat elements, as
        expanded tensors do, are new ones.

    Raises
    ------
    CheckpointMissingError
        There is no checkpoint, or a file of it is gone.
    CheckpointCorruptError
        A file is not as it was written. If a checksum says so, ``like`` is partly overwritten; load another checkpoint.
    CheckpointFormatError
        It is not a checkpoint of oneaccord, or it is of a newer version, or a file belongs to another save, or is a link, a pipe or the like. Or
        `save` does not write such metadata, whatever their checksum: no array is returned of which an element did not come from a file.
    OutOfMemoryError
        There is no memory for an array. If it is of ``like``, there is no memory for its copy.
    SizeMismatchError, DTypeError
        A leaf has another shape or dtype than ``like``.
    LayoutError
        A leaf of ``like`` is sparse, quantized, or without memory.
    UsageError
        ``like`` and the checkpoint have different leaves, or the ranks gave different paths.
    CommError
        A rank was lost, or did not come in time.

    All but the last are raised on every rank, and the group stays usable. Unless it is said, ``like`` is as it was.
    """
    ranks = Ranks(group, timeout_s)
    folder = Path(path)
    report = LoadReport() if report is None else report
    data = _meet(folder, ranks)
    task: _Task | None = None
    failure, mine = None, None
    tree = None
    try:
        metadata = _of_file(folder) if data is None else parse(data, str(folder / storage.METADATA), Metadata)
        task = _Task.of(folder, metadata, like, strict, ranks)
    except Exception as error:  # noqa: BLE001 - it is raised on all ranks
        failure, mine = ranks.failure(error), error
    offers = ranks.all_gather({"failure": failure, "path": os.fspath(path), "nbytes": task.nbytes if task else 0})
    ranks.raise_first([offer["failure"] for offer in offers], mine)
    paths = [offer["path"] for offer in offers]
    if len(set(paths)) > 1:
        raise UsageError(f"all ranks must load from one path, but they gave {paths}", rank=ranks.rank)
    assert task is not None
    try:
        with progress_bar("loading", task.nbytes, progress, ranks.rank) as advance:
            report.bytes_read = task.read(verify, advance)
        tree = task.finish()
        report.kept, report.unused = task.kept, task.unused
    except Exception as error:  # noqa: BLE001 - it is raised on all ranks
        failure, mine = ranks.failure(error), error
    patience_s = ranks.patience_s(max(offer["nbytes"] for offer in offers))
    ranks.raise_first(ranks.all_gather(failure, patience_s), mine)
    return tree


def _is_open(node: Any) -> bool:
    """Return whether a node takes all that the checkpoint has there."""
    return isinstance(node, dict) and not node


def read_metadata(path: Path) -> Metadata:
    """Return the content of a checkpoint, or of any safetensors file, and its places.

    Raises
    ------
    CheckpointError
        There is none, or it cannot be read; the kinds are those of `load`.
    """
    data = _find(path)
    return _of_file(path) if data is None else parse(data, str(path / storage.METADATA), Metadata)


def _find(path: Path) -> bytes | None:
    """Return the content of ``metadata.json``; None if the path is a file."""
    try:
        if path.is_file():
            return None
        data = storage.read_metadata(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", file=str(path)) from error
    if data is None:
        reason = f"it has no {storage.METADATA}: no save into it was completed" if path.is_dir() else "there is no such folder"
        raise CheckpointMissingError(f"{path} is not a complete checkpoint: {reason}", file=str(path))
    return data


def _meet(folder: Path, ranks: Ranks) -> bytes | None:
    """Let all ranks have the metadata that rank 0 finds, so that they read one checkpoint, even while it is replaced."""
    data: bytes | None = None
    failure, mine = None, None
    if ranks.rank == 0:
        try:
            data = _find(folder)
        except Exception as error:  # noqa: BLE001 - it is raised on all ranks
            failure, mine = ranks.failure(error), error
    offer = ranks.broadcast({"failure": failure, "data": data})
    ranks.raise_first([offer["failure"]], mine)
    found: bytes | None = offer["data"]
    return found


def _of_file(path: Path) -> Metadata:
    """Return the content of the header of a safetensors file."""
    try:
        descriptor, nbytes = storage.open_file(path, follow=True)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
            time = os.fstat(descriptor).st_mtime
            begin, tensors = safetensors.read_header(file, nbytes, str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", file=str(path)) from error
    arrays = {
        tensor.name: StoredArray(
            (tensor.name,),
            tensor.dtype,
            tensor.shape,
            [Chunk((0,) * len(tensor.shape), tensor.shape, path.name, begin + tensor.start, "")],
        )
        for tensor in tensors
    }
    return Metadata("", time, None, {path.name: nbytes}, 1, BLOCK_BYTES, None, arrays, {})


def _open(folder: Path, metadata: Metadata, name: str) -> File:
    path = folder / name if metadata.save else folder
    return File(path, metadata.files[name], metadata.save or None, metadata.block_bytes)


@dataclass
class _Task:
    """The data that one rank loads.

    Attributes
    ----------
    folder, metadata
        The checkpoint.
    finish
        Returns the tree, when all is read.
    wants
        The data to read, and their targets.
    nbytes
        The bytes of that.
    """

    folder: Path
    metadata: Metadata
    finish: Callable[[], Any] = lambda: None
    wants: list[Want] = field(default_factory=list)
    kept: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    _found: set[str] = field(default_factory=set)
    """The files that are there, and as long as they should be."""

    @classmethod
    def of(cls, folder: Path, metadata: Metadata, template: Any, strict: bool, ranks: Ranks) -> _Task:
        """Compare a tree with the content of a checkpoint."""
        if template is None:
            return cls._of_all(folder, metadata)
        given, spec = flatten(template, is_leaf=_is_open)
        stored: dict[str, StoredArray | StoredValue] = {**metadata.arrays, **metadata.values}
        leaves: dict[str, Any] = {}
        opened: dict[str, tuple[Any, ...]] = {}  # those that take all that the checkpoint has below a path
        owns: dict[
            str, tuple[Any, list[str]]
        ] = {}  # of what each rank has for itself, the tree and the names in the checkpoint
        found: set[str] = set()  # what is taken by these, and what other ranks have
        for (name, leaf), path in zip(given.items(), spec.paths(), strict=True):
            some: Iterable[tuple[str, Any, tuple[Any, ...]]] = [(name, leaf, path)]
            if isinstance(leaf, PerRank):
                inner, below = flatten(leaf.value, is_leaf=_is_open)
                owns[name] = below, [own_name(name, ranks.rank, short) for short in inner]
                found |= _of_others(name, leaf, stored, metadata.world_size, ranks, strict)
                some = zip(owns[name][1], inner.values(), ((*path, ranks.rank, *more) for more in below.paths()), strict=True)
            for full, each, whole_path in some:
                leaves[full] = each
                if _is_open(each):
                    opened[full] = whole_path
        task = cls(folder, metadata)
        taken = {
            name: {
                other: each for other, each in stored.items() if len(each.path) > len(path) and each.path[: len(path)] == path
            }
            for name, path in opened.items()
        }
        found.update(*taken.values())
        task.kept = tuple(name for name in leaves if name not in stored and name not in opened)
        task.unused = tuple(name for name in stored if name not in leaves and name not in found)
        if strict and (task.kept or task.unused):
            raise UsageError(
                f"the checkpoint and like= have different leaves: only like= has {_list(task.kept)}; only the checkpoint has "
                f"{_list(task.unused)}. With strict=False these stay as they are; an empty "
                "dict in like= takes all that the checkpoint has there"
            )
        results: dict[str, Callable[[], Any]] = {}
        in_torch = any(is_torch(leaf) for leaf in leaves.values())
        for name, leaf in leaves.items():
            try:
                if name in opened:
                    if name in stored:
                        kind = "an array" if name in metadata.arrays else "a value"
                        raise UsageError(
                            f"it is {kind} in the checkpoint, but an empty dict in like=, which takes only the content of a dict"
                        )
                    results[name] = task._nested(taken[name], len(opened[name]), in_torch=in_torch)
                elif name in metadata.values:
                    if not is_value(leaf):
                        raise UsageError(f"it is a value in the checkpoint, but {type(leaf).__qualname__} in like=")
                    results[name] = lambda value=metadata.values[name].value: from_json(value)  # type: ignore[misc]
                elif name in metadata.arrays:
                    results[name] = task._array(name, metadata.arrays[name], leaf)
                else:
                    results[name] = lambda leaf=leaf: leaf  # type: ignore[misc]
            except UsageError as error:
                raise type(error)(f"leaf {name!r}: {error}") from error

        def finish() -> Any:
            found = {name: result() for name, result in results.items()}
            for name, (below, names) in owns.items():
                found[name] = PerRank(rebuild(below, {each: found[each] for each in names}))
            return rebuild(spec, {name: found[name] for name in given})

        task.finish = finish
        return task

    @classmethod
    def _of_all(cls, folder: Path, metadata: Metadata) -> _Task:
        """Take all, whole, in nested dicts."""
        task = cls(folder, metadata)
        task.finish = task._nested({**metadata.arrays, **metadata.values}, 0)
        return task

    def _nested(
        self, leaves: Mapping[str, StoredArray | StoredValue], depth: int, *, in_torch: bool = False
    ) -> Callable[[], Any]:
        """Take some leaves, whole; return a function that makes nested dicts of them, by the keys of their paths from ``depth`` on."""
        passing: dict[str, Bits] = {}
        for name, stored in leaves.items():
            if isinstance(stored, StoredArray):
                passing[name] = self._want(name, stored, whole(stored.shape))

        def finish() -> Any:
            root: dict[Any, Any] = {(): {}}
            for name, stored in leaves.items():
                path = ((), *stored.path[depth:])
                inner: Any = root
                for key in path[:-1]:
                    inner = inner.setdefault(key, {})
                if isinstance(stored, StoredArray):
                    template = torch_template(stored.dtype) if in_torch else None
                    inner[path[-1]] = new_array(passing[name], stored.dtype, template)
                else:
                    inner[path[-1]] = from_json(stored.value)
            return root[()]

        return finish

    @property
    def nbytes(self) -> int:
        """The bytes that are read."""
        return sum(want.target.nbytes for want in self.wants)

    def read(self, verify: bool, advance: Callable[[int], object]) -> int:
        """Read all that is wanted; return how many bytes that were."""
        by_file: dict[str, list[Want]] = {}
        for want in self.wants:
            by_file.setdefault(want.chunk.file, []).append(want)
        count = 0
        for name, wants in by_file.items():
            with _open(self.folder, self.metadata, name) as file:
                file.read(wants, verify, advance)
                count += file.bytes_read
        return count

    def _array(self, name: str, stored: StoredArray, leaf: Any) -> Callable[[], Any]:
        """Let an array, or the pieces of one, be read; return a function that makes the result of it."""
        if is_value(leaf):
            raise UsageError(
                f"it is an array of shape {stored.shape} in the checkpoint, but {type(leaf).__qualname__} in like="
            )
        for each in [piece for _, piece in leaf.pieces] if isinstance(leaf, ShardedArray) else [leaf]:
            words = oddity(each)
            if words:
                raise LayoutError(f"an array cannot be loaded into a value that is {words}")
        if isinstance(leaf, Distributed):
            pieces_of = self._array(name, stored, leaf.sharded_array())
            return lambda: leaf.with_sharded_array(pieces_of())
        if isinstance(leaf, ShardedArray):
            _compare(stored, leaf.shape, leaf.dtype)
            pieces = [(box.offset, self._piece(name, stored, box, array)) for box, array in leaf.pieces]
            return lambda: ShardedArray(leaf.shape, [(offset, piece()) for offset, piece in pieces], leaf.dtype)
        array = readable(leaf)
        _compare(stored, shape_of(array), dtype_of(array))
        if isinstance(leaf, np.generic):
            scalar = self._piece(name, stored, whole(stored.shape), array)
            return lambda: scalar()[()]
        return self._piece(name, stored, whole(stored.shape), leaf)

    def _piece(self, name: str, stored: StoredArray, box: Box, array: Array) -> Callable[[], Array]:
        """Let a box be read into an array, or into memory from which it comes there."""
        own = readable(array)
        bits = as_bits(own)
        if bits is not None:
            self._want(name, stored, box, bits)
            return lambda: array
        passing = self._want(name, stored, box)

        def finish() -> Array:
            found = new_array(passing, stored.dtype, own)
            if not assignable(array):
                return as_in_library(found, array)
            write(own, found)
            return array

        return finish

    def _want(self, name: str, stored: StoredArray, box: Box, target: Bits | None = None) -> Bits:
        """Let a box be read into memory, by default new one, which is returned."""
        parts = [(chunk, common) for chunk in stored.chunks if (common := chunk.box.intersection(box)) is not None]
        # Before there is any memory for their content: they are as long as all the arrays that they should have.
        for file in {chunk.file for chunk, _ in parts} - self._found:
            _open(self.folder, self.metadata, file).close()
            self._found.add(file)
        if target is None:
            try:
                target = empty(box.shape, stored.dtype)
            except MemoryError as error:
                raise OutOfMemoryError(
                    f"leaf {name!r}: there is no memory for its shape {box.shape} of {stored.dtype}"
                ) from error
        for chunk, common in parts:
            self.wants.append(Want(name, chunk, common.within(chunk.box), cut(target, common.within(box))))
        return target


def _of_others(name: str, leaf: PerRank, stored: Mapping[str, Any], saved: int, ranks: Ranks, strict: bool) -> set[str]:
    """Return the values that other ranks have saved for themselves under a name.

    Raises
    ------
    UsageError
        Other than ``saved`` ranks load, and with ``strict`` nothing may be left out.
    """
    if strict and ranks.count != saved:
        raise UsageError(
            f"leaf {name!r}: {leaf!r} is what each rank has for itself; {saved} ranks have saved it, and {ranks.count} load it. Load it on {saved} "
            "ranks; with strict=False, ranks without one keep what they have; and without like= a load returns those of all ranks"
        )
    found, start = set(), len(own_name(name, 0, "")) - 1
    for each in stored:
        number = each[start:].partition(".")[0]
        if _RANK.fullmatch(number) and each.startswith(own_name(name, int(number), "")):
            found |= {each} if int(number) < saved and int(number) != ranks.rank else set()
    return found


def _compare(stored: StoredArray, shape: tuple[int, ...], dtype: str) -> None:
    if stored.shape != shape:
        raise SizeMismatchError(f"it has shape {stored.shape} in the checkpoint, but {shape} in like=")
    if stored.dtype != dtype:
        raise DTypeError(f"it has dtype {stored.dtype} in the checkpoint, but {dtype} in like=")


def _list(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(repr, names[:10])) or "none"
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
