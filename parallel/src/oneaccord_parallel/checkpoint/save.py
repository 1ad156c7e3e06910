"""Writing a checkpoint."""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from oneaccord import Group
from oneaccord_parallel.checkpoint import storage
from oneaccord_parallel.checkpoint.errors import CheckpointWriteError
from oneaccord_parallel.checkpoint.host import Bytes, bytes_of
from oneaccord_parallel.checkpoint.metadata import (
    BLOCK_BYTES,
    Chunk,
    Metadata,
    Stamp,
    StoredArray,
    StoredValue,
    dump,
    parse,
)
from oneaccord_parallel.checkpoint.plan import Part, Plan, make_plan
from oneaccord_parallel.checkpoint.progress import progress_bar
from oneaccord_parallel.checkpoint.ranks import Ranks
from oneaccord_parallel.checkpoint.safetensors import Tensor, header

__all__ = ["save", "write"]


def save(
    tree: Any,
    path: str | os.PathLike[str],
    group: Group | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    check: bool = True,
    progress: bool | None = None,
    timeout_s: float | None = None,
) -> None:
    """Save a tree of arrays, so that any number of ranks can load it. Every rank calls it.

    The path then holds the new checkpoint, whole, or the one that was there before: the last step is one rename. When the call returns, all
    is on the disk (fsync). There are three collectives of small objects.

    Parameters
    ----------
    tree
        Dicts, lists, tuples and their kin, and in them:

        - arrays of NumPy, CuPy, torch and JAX. All ranks must have the same, bit for bit; each writes a share.
        - `ShardedArray` and `DTensor`: each rank's pieces. A piece that several ranks have is written once.
        - bool, int, float, complex, str and bytes, equal on all ranks. None is not a leaf.
        - `PerRank`: a value that each rank has for itself.
    path
        A folder that all ranks see, the same on all. It is made if need be; of its content, only the files of an earlier checkpoint are
        replaced. No other program may save into it at the same time: the files of saves that are not complete are removed.
    group
        The ranks that save; None for one process that is no rank.
    step
        A number for `latest` and `describe`.
    extra
        The value that `describe` shall give back: Python values in lists and dicts, equal on all ranks.
    check
        Whether the ranks compare checksums of the arrays that all of them have. Each rank reads all of its bytes for that, some GB in a
        second; arrays on a GPU come to the host. Without, arrays that differ end in a mixture.
    progress
        Whether rank 0 shows a progress bar; by default for 256 MiB or more on a terminal.
    timeout_s
        Seconds that each collective may wait for the other ranks; by default the group's, but ten minutes and more for ranks that write.

    Raises
    ------
    UsageError
        The ranks gave different trees, steps or the like, or arrays of different content; a leaf is none of the above; or pieces of an array overlap in part, or leave
        elements out. Nothing was written.
    DTypeError
        A dtype cannot be stored: big-endian, structured, long double, text, objects.
    LayoutError
        A leaf is sparse, quantized, or without memory.
    CheckpointWriteError
        A rank could not write; the text names it, and the file. The path holds the checkpoint from before; or the new one, whole, if what
        failed is the very last fsync, which follows the rename.
    CheckpointFormatError
        The folder holds a ``metadata.json`` that is not ours, or is newer. Nothing was written.
    CommError
        A rank was lost, or did not come in time. The path holds one of the two checkpoints, whole; the next save removes the other files.

    All but the last are raised on every rank, and the group stays usable.
    """
    ranks = Ranks(group, timeout_s)
    plan = make_plan(tree, path, ranks, step, extra, check=check)
    with progress_bar("saving", plan.largest_bytes, progress, ranks.rank) as advance:
        write(plan, ranks, lambda: plan.parts, advance)


@dataclass(frozen=True)
class _File:
    """The result of a save on one rank."""

    name: str
    nbytes: int
    chunks: list[tuple[str, Chunk]]


def write(
    plan: Plan,
    ranks: Ranks,
    parts: Callable[[], list[Part]],
    advance: Callable[[int], object],
    finish: Callable[[], object] = lambda: None,
    not_before: float = 0.0,
) -> float:
    """Write the planned data, and commit it, in two collectives; see `save`.

    Parameters
    ----------
    plan
        The result of `make_plan`.
    ranks
        Those of the plan.
    parts
        Returns this rank's parts, which may be copies of those of the plan.
    advance
        Called with the number of bytes that were written.
    finish
        The work of rank 0 after the commit, such as to tidy up: an OSError has no consequence.
    not_before
        The time of the new checkpoint is later than this, whatever the clock says.

    Returns
    -------
    float
        The time of the new checkpoint.
    """
    written: _File | None = None
    mine: Exception | None = None
    name = storage.data_file(plan.save, ranks.rank)
    try:
        written = _write_parts(plan, name, parts(), advance)
    except OSError as error:
        mine = CheckpointWriteError(f"cannot write {plan.path / name}: {error}", file=str(plan.path / name))
        mine.__cause__ = error
    except Exception as error:  # noqa: BLE001 - it is raised on all ranks
        mine = error
    failure = ranks.failure(mine) if mine is not None else None
    patience_s = ranks.patience_s(plan.largest_bytes)
    outcomes = ranks.gather({"failure": failure, "file": written}, patience_s)
    failures = [outcome["failure"] for outcome in outcomes]
    is_committed, when = False, 0.0
    if ranks.rank == 0 and not any(failures):
        try:
            files = [msgspec.convert(outcome["file"], _File | None) for outcome in outcomes]
            metadata = _commit(plan, [file for file in files if file is not None], ranks.count, not_before)
            is_committed, when = True, metadata.time
            with contextlib.suppress(OSError):  # the next save tries again
                storage.remove_others(plan.path, metadata.files)
                finish()
        except Exception as error:  # noqa: BLE001 - it is raised on all ranks
            is_committed = is_committed or _is_there(plan)
            where = str(plan.path / storage.METADATA)
            known = CheckpointWriteError(f"cannot write {where}: {error}", file=where) if isinstance(error, OSError) else error
            mine, failures = known, [ranks.failure(known)]
    verdict = ranks.broadcast({"failures": failures, "is_committed": is_committed, "time": when}, patience_s)
    if any(verdict["failures"]):
        if not verdict["is_committed"]:
            with contextlib.suppress(OSError):  # the next save tries again
                storage.remove([plan.path / name])
        ranks.raise_first(verdict["failures"], mine)
    return float(verdict["time"])


def _write_parts(plan: Plan, name: str, parts: list[Part], advance: Callable[[int], object]) -> _File | None:
    """Write this rank's file, and return its content; None if there is nothing to write."""
    if not parts:
        return None
    tensors: list[Tensor] = []
    names: set[str] = {"__metadata__"}
    stop = 0
    for part in parts:
        start, stop = stop, stop + part.nbytes
        tensors.append(Tensor(_tensor_name(part, names), str(part.leaf.dtype), part.box.shape, start, stop))
    head = header(tensors, plan.save)
    with ThreadPoolExecutor(1) as checker:
        sums = []

        def contents() -> Any:
            yield head
            for part in parts:
                data = bytes_of(part.array)
                # Checksums are made while the disk works.
                sums.append(checker.submit(_checksums, data))
                yield data.data

        storage.write_file(plan.path / name, contents(), advance)
        storage.sync_folder(plan.path)
        chunks = [
            (part.leaf.name, Chunk(part.box.offset, part.box.shape, name, len(head) + tensor.start, crc.result()))
            for part, tensor, crc in zip(parts, tensors, sums, strict=True)
        ]
    return _File(name, len(head) + stop, chunks)


def _tensor_name(part: Part, taken: set[str]) -> str:
    """Return the name of a part in its file: that of its leaf, and for parts of a leaf with the index of their first element."""
    name = part.leaf.name
    if part.box.shape != part.leaf.shape:
        name += "@" + ",".join(map(str, part.box.offset))
    while name in taken:
        name += "@"
    taken.add(name)
    return name


def _checksums(data: Bytes) -> str:
    view = data.data
    return "".join(f"{zlib.crc32(view[at : at + BLOCK_BYTES]):08x}" for at in range(0, len(view), BLOCK_BYTES))


def _commit(plan: Plan, files: list[_File], world_size: int, not_before: float) -> Metadata:
    for file in files:
        path = plan.path / file.name
        found = path.stat().st_size if path.exists() else None
        if found != file.nbytes:
            raise OSError(
                f"rank 0 finds {found} bytes of {file.name}, but {file.nbytes} were written: all ranks must see the same folder"
            )
    chunks: dict[str, list[Chunk]] = {leaf.name: [] for leaf in plan.leaves}
    for file in files:
        for leaf, chunk in file.chunks:
            chunks[leaf].append(chunk)
    metadata = Metadata(
        save=plan.save,
        time=max(time.time(), not_before + 1e-6),
        step=plan.step,
        files={file.name: file.nbytes for file in files},
        world_size=world_size,
        block_bytes=BLOCK_BYTES,
        extra=plan.extra,
        arrays={
            leaf.name: StoredArray(leaf.path, leaf.dtype, leaf.shape, sorted(chunks[leaf.name], key=lambda chunk: chunk.offset))
            for leaf in plan.leaves
            if leaf.dtype is not None
        },
        values={leaf.name: StoredValue(leaf.path, leaf.value) for leaf in plan.leaves if leaf.dtype is None},
    )
    storage.commit(plan.path, dump(metadata))
    return metadata


def _is_there(plan: Plan) -> bool:
    """Return whether the folder holds this save, after an error of which that cannot be known."""
    try:
        data = storage.read_metadata(plan.path)
        return data is not None and parse(data, str(plan.path), Stamp).save == plan.save
    except Exception:  # noqa: BLE001 - then nothing is removed
        return True
