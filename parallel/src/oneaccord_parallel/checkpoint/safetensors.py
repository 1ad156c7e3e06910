"""The format of the data files: a length, a header in JSON, and the bytes of each array, C-contiguous, without gaps.

See https://github.com/huggingface/safetensors. The package itself stores strided arrays wrong, and copies the arrays that it writes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import msgspec

from oneaccord.errors import DTypeError
from oneaccord_parallel.arrays import itemsize
from oneaccord_parallel.checkpoint.documents import Count, Extents, decode
from oneaccord_parallel.checkpoint.errors import CheckpointCorruptError, CheckpointFormatError

__all__ = ["Tensor", "check_dtype", "header", "nbytes_of", "prefix", "read_header"]

_CODES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
_IN_DISGUISE: dict[str, tuple[str, tuple[int, ...]]] = {
    "complex128": ("F64", (2,)),
    **{f"float8_{kind}": ("U8", ()) for kind in ("e4m3", "e3m4", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz")},
}
"""Dtypes that the format lacks: the substitute, and the axes that it adds. The checkpoint's metadata has the true one."""
_NAMES = {code: name for name, code in _CODES.items()}
_NONE: Final = "is not a safetensors file"
_WIDTHS = {"bfloat16": 2, **{name: 1 for name in (*_CODES, *_IN_DISGUISE) if name.startswith("float8_")}}
_ALIGNMENT = 8
_LARGEST_HEADER = 100_000_000
"""As in the package: a larger header is not a safetensors file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array of a file: its name there, dtype, shape, and its bytes, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def check_dtype(dtype: str) -> None:
    """Refuse a dtype that cannot be stored.

    Raises
    ------
    DTypeError
        It is not the name of one that can.
    """
    if dtype not in _CODES and dtype not in _IN_DISGUISE:
        hint = "; convert it with x.astype(x.dtype.newbyteorder('='))" if dtype[:1] == ">" else ""
        raise DTypeError(f"a checkpoint cannot hold dtype {dtype}{hint}: it holds {', '.join([*_CODES, *_IN_DISGUISE])}")


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of an array that a file may say it has.

    Raises
    ------
    DTypeError
        A checkpoint cannot hold this dtype.
    ValueError
        There can be no such array in memory: its axes without those of length 0 have more bytes than an address can count.
    """
    check_dtype(dtype)
    # The content of a file can be listed even if ml_dtypes is not installed.
    each = _WIDTHS.get(dtype) or itemsize(dtype)
    if math.prod(extent or 1 for extent in shape) * each >= 2**63:
        raise ValueError(f"no memory can hold an array of {dtype} with shape {tuple(shape)}")
    return math.prod(shape) * each


class _Entry(msgspec.Struct):
    """An array, as a header describes it."""

    dtype: str
    shape: Extents
    data_offsets: tuple[Count, Count]


def prefix(identity: str) -> bytes:
    """Return how the header of each file of one save begins, behind its length."""
    return b'{"__metadata__":' + msgspec.json.encode({"oneaccord": identity})


def header(tensors: Iterable[Tensor], identity: str) -> bytes:
    """Return the length and the header of a file: the bytes before the data."""
    entries = [prefix(identity)]
    for tensor in tensors:
        code, axes = (_CODES[tensor.dtype], ()) if tensor.dtype in _CODES else _IN_DISGUISE[tensor.dtype]
        entry = {"dtype": code, "shape": (*tensor.shape, *axes), "data_offsets": (tensor.start, tensor.stop)}
        entries.append(msgspec.json.encode(tensor.name) + b":" + msgspec.json.encode(entry))
    text = b",".join(entries) + b"}"
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def read_header(file: BinaryIO, nbytes: int, name: str) -> tuple[int, list[Tensor]]:
    """Read the header of any safetensors file.

    Parameters
    ----------
    file
        The file, at its beginning.
    nbytes
        Its length.
    name
        Its path, for errors.

    Returns
    -------
    int, list of Tensor
        The position of the data, and the arrays.

    Raises
    ------
    CheckpointFormatError
        It is no such file, or has a dtype that this does not know, or its arrays do not fill it: they overlap, or leave bytes out.
    CheckpointCorruptError
        It is shorter than its header says.
    OSError
        It cannot be read.
    """
    (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
    if not 0 < length <= min(_LARGEST_HEADER, nbytes - 8):
        raise CheckpointFormatError(f"{name} {_NONE}: of {nbytes} bytes its header would have {length}", file=name)
    found = decode(file.read(length), dict[str, Any], name, _NONE)
    found.pop("__metadata__", None)
    try:
        entries = msgspec.convert(found, dict[str, _Entry])
    except msgspec.ValidationError as error:
        raise CheckpointFormatError(f"{name} {_NONE}: {error}", file=name) from error
    tensors = [_tensor(key, entry, name) for key, entry in entries.items()]
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != end:
            how = "overlap" if tensor.start < end else "leave bytes out between them"
            raise CheckpointFormatError(
                f"{name} {_NONE}: {tensor.name!r} begins at byte {tensor.start} of the data, and {last or 'the data'!r} "
                f"{'ends' if last else 'begins'} at byte {end}, so that they {how}",
                file=name,
            )
        end, last = tensor.stop, tensor.name
    missing = 8 + length + end - nbytes
    if missing > 0:
        raise CheckpointCorruptError(f"{name} is truncated: {missing} bytes are missing at its end", file=name)
    if missing < 0:
        raise CheckpointFormatError(f"{name} {_NONE}: there are {-missing} bytes behind its last array", file=name)
    return 8 + int(length), tensors


def _tensor(key: str, entry: _Entry, file: str) -> Tensor:
    start, stop = entry.data_offsets
    try:
        if entry.dtype not in _NAMES:
            raise ValueError(f"it has dtype {entry.dtype!r}, and oneaccord reads {', '.join(_NAMES)}")
        nbytes = nbytes_of(_NAMES[entry.dtype], entry.shape)
        if stop - start != nbytes:
            raise ValueError(f"its shape {entry.shape} takes {nbytes} bytes, and it has bytes {start} to {stop}")
    except ValueError as error:
        raise CheckpointFormatError(f"{file} {_NONE} that can be read here: {key!r}: {error}", file=file, leaf=key) from error
    return Tensor(key, _NAMES[entry.dtype], entry.shape, start, stop)
