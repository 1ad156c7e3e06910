"""The format of the data files: a length, a header in JSON, and the bytes of each array, C-contiguous, without gaps.

See https://github.com/huggingface/safetensors. The package itself stores strided arrays wrong, and copies what it writes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from manyhands.errors import DTypeError
from manyhands_parallel.checkpoint.errors import CheckpointCorruptError, CheckpointFormatError

__all__ = ["Tensor", "check_dtype", "header", "parse", "prefix"]

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
"""Dtypes that the format lacks: the one that stands for them, and the axes that it adds. The checkpoint's metadata has the true one."""
_NAMES = {code: name for name, code in _CODES.items()}
_ALIGNMENT = 8
_LARGEST_HEADER = 100_000_000
"""As in the package: what is larger is no safetensors file."""


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


def prefix(identity: str) -> bytes:
    """Return how the header of each file of one save begins, behind its length."""
    return b'{"__metadata__":' + msgspec.json.encode({"manyhands": identity})


def header(tensors: Iterable[Tensor], identity: str) -> bytes:
    """Return the length and the header of a file: what stands before the data."""
    text = prefix(identity)
    for tensor in tensors:
        code, axes = (_CODES[tensor.dtype], ()) if tensor.dtype in _CODES else _IN_DISGUISE[tensor.dtype]
        entry = {"dtype": code, "shape": (*tensor.shape, *axes), "data_offsets": (tensor.start, tensor.stop)}
        text += b"," + msgspec.json.encode(tensor.name) + b":" + msgspec.json.encode(entry)
    text += b"}"
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def parse(head: bytes, nbytes: int, file: str) -> tuple[int, list[Tensor]] | int:
    """Read the header of any safetensors file.

    Parameters
    ----------
    head
        The first bytes of the file.
    nbytes
        The length of the file.
    file
        Its path, for errors.

    Returns
    -------
    int or (int, list of Tensor)
        How many bytes ``head`` must have; or, if it has them, where the data begins, and the arrays.

    Raises
    ------
    CheckpointFormatError
        It is no such file.
    CheckpointCorruptError
        It is shorter than its header says.
    """
    if nbytes < 8:
        raise CheckpointFormatError(f"{file} is no safetensors file: it has {nbytes} bytes", file=file)
    (length,) = struct.unpack("<Q", head[:8])
    if length > min(_LARGEST_HEADER, nbytes - 8):
        raise CheckpointFormatError(f"{file} is no safetensors file: its header would have {length} bytes", file=file)
    if len(head) < 8 + length:
        return 8 + int(length)
    try:
        entries: dict[str, Any] = msgspec.json.decode(head[8 : 8 + length], type=dict[str, Any])
        entries.pop("__metadata__", None)
        tensors = [
            Tensor(name, _NAMES[entry["dtype"]], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for name, entry in entries.items()
        ]
    except KeyError as error:
        raise CheckpointFormatError(f"{file} has an array without, or of another, {error}", file=file) from error
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise CheckpointFormatError(f"{file} is no safetensors file: {error}", file=file) from error
    missing = 8 + length + max([tensor.stop for tensor in tensors], default=0) - nbytes
    if missing > 0:
        raise CheckpointCorruptError(f"{file} is truncated: {missing} bytes are missing at its end", file=file)
    return 8 + int(length), tensors
