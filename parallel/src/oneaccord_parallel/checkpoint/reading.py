"""Reading boxes out of the chunks of a checkpoint: the bytes that are wanted, and no others."""

from __future__ import annotations

import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from oneaccord_parallel.boxes import Box
from oneaccord_parallel.checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
)
from oneaccord_parallel.checkpoint.host import Bits
from oneaccord_parallel.checkpoint.metadata import Chunk
from oneaccord_parallel.checkpoint.safetensors import prefix
from oneaccord_parallel.checkpoint.storage import open_file

__all__ = ["File", "Want"]

_SLICE_BYTES = 8 << 20
"""How much is read at once."""
_SHORT_BYTES = 16 << 10
"""Runs that are shorter are copied from mapped memory: a call to the system for each would cost more than the bytes. (If the disk fails there, a signal
ends the process.)"""


@dataclass(frozen=True)
class Want:
    """Elements of a chunk, and their target.

    Attributes
    ----------
    leaf
        The name of the array, for errors.
    chunk
        The chunk.
    box
        Which elements, counted from the beginning of the chunk.
    target
        Host memory of the shape of the box.
    """

    leaf: str
    chunk: Chunk
    box: Box
    target: Bits

    @property
    def chunk_bytes(self) -> int:
        """The bytes of the whole chunk."""
        return math.prod(self.chunk.shape) * self.target.itemsize

    @property
    def inner(self) -> int:
        """The first axis from which on the elements are one run in the file, for each index along the axes before."""
        axis = len(self.box.shape)
        while axis > 0 and (axis == len(self.box.shape) or self.box.shape[axis] == self.chunk.shape[axis]):
            axis -= 1
        while axis > 0 and self.box.shape[axis - 1] == 1:
            axis -= 1
        return axis

    @property
    def start(self) -> int:
        """The first byte, counted from the beginning of the chunk."""
        return self._position(self.box.offset)

    @property
    def stop(self) -> int:
        """The byte behind the last one."""
        last = tuple(start + extent - 1 for start, extent in zip(self.box.offset, self.box.shape, strict=True))
        return self._position(last) + self.target.itemsize

    def runs(self) -> Iterator[tuple[int, Bits]]:
        """Yield the blocks that are side by side in the file: the first byte of each, counted from the beginning of the chunk, and its target."""
        axis = self.inner
        for index in np.ndindex(self.box.shape[:axis]):
            place = (*(start + step for start, step in zip(self.box.offset, index, strict=False)), *self.box.offset[axis:])
            yield self._position(place), self.target[(*index, ...)]

    def _position(self, place: tuple[int, ...]) -> int:
        element = 0
        for index, extent in zip(place, self.chunk.shape, strict=True):
            element = element * extent + index
        return element * self.target.itemsize


class File:
    """A data file that is open for reading.

    Parameters
    ----------
    path
        The file.
    nbytes
        How long it must be.
    save
        Which save it must be of; None for any safetensors file.
    block_bytes
        How many bytes are under one checksum.

    Raises
    ------
    CheckpointMissingError
        There is none.
    CheckpointCorruptError
        It has another length.
    CheckpointFormatError
        It is of another save, or no regular file.
    """

    def __init__(self, path: Path, nbytes: int, save: str | None, block_bytes: int) -> None:
        self._path = str(path)
        self._block_bytes = block_bytes
        self._mapped: mmap.mmap | None = None
        self.bytes_read: int = 0
        try:
            # The path of a safetensors file is the user's, who may have made it a link.
            self._descriptor, found = open_file(path, follow=save is None)
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CheckpointMissingError(f"{path} is missing, but the checkpoint needs it", file=self._path) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}", file=self._path) from error
        try:
            if found != nbytes:
                raise CheckpointCorruptError(f"{path} has {found} bytes, and had {nbytes} when it was saved", file=self._path)
            if save is not None:
                first = prefix(save)
                if os.pread(self._descriptor, len(first), 8) != first:
                    raise CheckpointFormatError(f"{path} is damaged, or the file of another save", file=self._path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._mapped = None  # it is unmapped when nothing refers to it
        os.close(self._descriptor)

    def read(self, wants: list[Want], verify: bool, advance: Callable[[int], object]) -> None:
        """Read the wanted bytes; every block that is read wholly, and in order, is compared with its checksum.

        Raises
        ------
        CheckpointCorruptError
            A checksum differs, or the file ends too soon.
        CheckpointError
            The system cannot read the file.
        """
        check: _Check | None = None
        for want in sorted(wants, key=lambda want: (want.chunk.start, want.start)):
            if check is None or check.chunk is not want.chunk:
                check = _Check(want, self._path, self._block_bytes)
            with self._errors(want.leaf):
                if verify:
                    self._verify(want)
                self._read(want, check, advance)

    def _read(self, want: Want, check: _Check, advance: Callable[[int], object]) -> None:
        is_one_run = want.inner == 0
        if not is_one_run and math.prod(want.box.shape[want.inner :]) * want.target.itemsize < _SHORT_BYTES:
            if self._mapped is None:
                self._mapped = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
            chunk = np.frombuffer(self._mapped, want.target.dtype, math.prod(want.chunk.shape), want.chunk.start)
            want.target[...] = chunk.reshape(want.chunk.shape)[want.box.slices]
            self.bytes_read += want.target.nbytes
            advance(want.target.nbytes)
            return
        for position, target in want.runs():
            self._read_run(want.chunk.start, position, target, check, advance)

    def _read_run(self, start: int, position: int, target: Bits, check: _Check, advance: Callable[[int], object]) -> None:
        """Read bytes that are side by side in the file into an array of any strides."""
        if target.flags.c_contiguous:
            view = target.reshape(-1).view(np.uint8).data
            while view:
                part = view[:_SLICE_BYTES]
                self._fill(part, start + position)
                check.feed(position, part)
                advance(len(part))
                position += len(part)
                view = view[len(part) :]
        elif target.nbytes <= _SLICE_BYTES or target.shape[0] == 1:
            if target.nbytes > _SLICE_BYTES:
                self._read_run(start, position, target[0], check, advance)
                return
            passing = np.empty(target.shape, target.dtype)
            self._read_run(start, position, passing, check, advance)
            target[...] = passing
        else:
            middle = target.shape[0] // 2
            self._read_run(start, position, target[:middle], check, advance)
            self._read_run(start, position + target[:middle].nbytes, target[middle:], check, advance)

    def _verify(self, want: Want) -> None:
        """Read all blocks that have wanted bytes."""
        size, nbytes = self._block_bytes, want.chunk_bytes
        check = _Check(want, self._path, size)
        block = memoryview(bytearray(min(size, nbytes)))
        for position in range(want.start // size * size, min(-(-want.stop // size) * size, nbytes), size):
            part = block[: min(size, nbytes - position)]
            self._fill(part, want.chunk.start + position)
            check.feed(position, part)

    def _fill(self, target: memoryview, position: int) -> None:
        while target:
            count = os.preadv(self._descriptor, [target], position)
            if count == 0:
                raise CheckpointCorruptError(f"{self._path} ends at byte {position}, before its length", file=self._path)
            self.bytes_read += count
            position += count
            target = target[count:]

    @contextmanager
    def _errors(self, leaf: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            error.leaf = leaf
            raise
        except OSError as error:
            raise CheckpointError(f"leaf {leaf!r}: {self._path} cannot be read: {error}", file=self._path, leaf=leaf) from error


class _Check:
    """Compares the blocks of a chunk with their checksums as they are read, one behind the other."""

    def __init__(self, want: Want, file: str, block_bytes: int) -> None:
        self.chunk = want.chunk
        self._nbytes = want.chunk_bytes
        self._leaf, self._file = want.leaf, file
        self._size = block_bytes
        self._at = 0
        self._is_whole, self._crc = True, 0

    def feed(self, position: int, data: memoryview) -> None:
        """Take the bytes from ``position`` on; if it is not the end of the last ones, the next block that can be checked begins later."""
        if not self.chunk.crc32:
            return
        if position != self._at:
            self._at, self._is_whole, self._crc = position, position % self._size == 0, 0
        while data:
            number = self._at // self._size
            end = min((number + 1) * self._size, self._nbytes)
            part = data[: end - self._at]
            if self._is_whole:
                self._crc = zlib.crc32(part, self._crc)
            self._at += len(part)
            data = data[len(part) :]
            if self._at == end:
                self._compare(number)

    def _compare(self, number: int) -> None:
        expected = self.chunk.crc32[8 * number : 8 * number + 8]
        if self._is_whole and f"{self._crc:08x}" != expected:
            raise CheckpointCorruptError(
                f"leaf {self._leaf!r}: {self._file} is damaged in bytes {number * self._size} to {self._at} of the chunk at "
                f"{self.chunk.offset}: their checksum is {self._crc:08x}, and was {expected}",
                file=self._file,
                leaf=self._leaf,
            )
        self._is_whole, self._crc = True, 0
