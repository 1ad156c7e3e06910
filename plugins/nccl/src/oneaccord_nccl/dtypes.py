"""Which dtype and reduction NCCL performs, and as what; the rest is refused in words that say what to do.

What is moved without being reduced moves as bytes, whatever its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from oneaccord.api import UnsupportedError

__all__ = ["BYTE", "Abilities", "Wire", "named", "wire_of"]

BYTE: int = 1
"""NCCL's type of a byte."""

_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
_OPS = {"sum": 0, "product": 1, "max": 2, "min": 3, "mean": 4}
# NumPy's bool is a byte that holds 0 or 1.
_BOOL_OPS = {"min": "min", "and": "min", "max": "max", "or": "max"}
_BITWISE = frozenset({"and", "or", "xor"})
_PARTS = {"complex64": "float32", "complex128": "float64"}
_WIDER = {"int16": "int32", "uint16": "int32"}

_BFLOAT16_VERSION = 21003
_MEAN_VERSION = 21000
_FLOAT8_VERSION = 22400
_FLOAT8_CAPABILITY = (9, 0)

_ON_THE_HOST = 'copy it to the host and reduce it there, or let gpu_fallback = "host" do so'


@dataclass(frozen=True, slots=True)
class Abilities:
    """What decides about reductions, alike on all ranks.

    Attributes
    ----------
    version
        NCCL's version, as it numbers itself.
    capability
        The least compute capability of all ranks' GPUs.
    accumulate
        The dtype for sums and means of narrower floats; None for that of the arrays.
    """

    version: int
    capability: tuple[int, int]
    accumulate: np.dtype[Any] | None = None


@dataclass(frozen=True, slots=True)
class Wire:
    """How NCCL reduces arrays of a dtype.

    Attributes
    ----------
    type, op
        NCCL's numbers of them.
    per_element
        How many of NCCL's elements make one of the array's.
    """

    type: int
    op: int
    per_element: int = 1


def wire_of(dtype: np.dtype[Any], op: str, abilities: Abilities) -> Wire:
    """Return how NCCL reduces arrays of ``dtype`` by ``op``.

    Raises
    ------
    UnsupportedError
        It does not.
    """
    name = dtype.name
    if op not in _OPS and op not in _BITWISE:
        raise UnsupportedError(f"NCCL has no op={op}: use one of {', '.join(_OPS)}; {_ON_THE_HOST}")
    if name == "bool":
        if op not in _BOOL_OPS:
            raise UnsupportedError(
                f'NCCL has no op="{op}" for bool, only and, or, min and max: reduce x.astype("uint8") by sum, or {_ON_THE_HOST}'
            )
        return Wire(BYTE, _OPS[_BOOL_OPS[op]])
    if op not in _OPS:
        raise UnsupportedError(f'NCCL has no op="{op}", which is bitwise: {_ON_THE_HOST}')
    if op == "mean" and abilities.version < _MEAN_VERSION:
        raise UnsupportedError(
            f'NCCL has op="mean" from 2.10 on, and the installed version is {named(abilities.version)}: use op="sum" and divide'
        )
    if name in _PARTS:
        if op not in {"sum", "mean"}:
            raise UnsupportedError(f'NCCL has no op="{op}" for {name}, only sum and mean: {_ON_THE_HOST}')
        return Wire(_TYPES[_PARTS[name]], _OPS[op], 2)
    if name not in _TYPES:
        wider = _WIDER.get(name, "float16" if name.startswith("float8") else "float64" if dtype.kind == "f" else "complex128")
        raise UnsupportedError(f'NCCL does not reduce {name}: convert it with x.astype("{wider}"), or {_ON_THE_HOST}')
    _check_low_precision(name, abilities)
    return Wire(_TYPES[name], _OPS[op])


def _check_low_precision(name: str, abilities: Abilities) -> None:
    if name == "bfloat16" and abilities.version < _BFLOAT16_VERSION:
        raise UnsupportedError(
            f'NCCL reduces bfloat16 from 2.10.3 on, and the installed version is {named(abilities.version)}: convert it with x.astype("float32")'
        )
    if not name.startswith("float8"):
        return
    if abilities.version < _FLOAT8_VERSION:
        raise UnsupportedError(
            f'NCCL reduces {name} from 2.24 on, and the installed version is {named(abilities.version)}: convert it with x.astype("float16")'
        )
    if abilities.capability < _FLOAT8_CAPABILITY:
        major, minor = abilities.capability
        raise UnsupportedError(
            f"NCCL reduces {name} on GPUs of compute capability 9.0 or higher, and one of this job has {major}.{minor}: convert it with "
            'x.astype("float16")'
        )


def named(version: int) -> str:
    """Return a version of NCCL's as people write it: 23203 is 2.32.3."""
    base = 10_000 if version >= 10_000 else 1_000
    return f"{version // base}.{version % base // 100}.{version % 100}"
