"""Find the library of an array that a call is given.

No library is imported here: the library of an array is already in ``sys.modules``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from oneaccord.arrays.libraries.cupy import CuPyLibrary
from oneaccord.arrays.libraries.library import DeviceArray, Lane, Library
from oneaccord.arrays.libraries.shared import WAYS_OUT
from oneaccord.arrays.libraries.standard import JaxLibrary, StandardLibrary
from oneaccord.arrays.libraries.torch import TorchLibrary

__all__ = ["WAYS_OUT", "DeviceArray", "Lane", "Library", "device_library", "device_number", "library_of", "present"]

_BY_BASE: tuple[tuple[str, str, Library], ...] = (
    ("cupy", "ndarray", CuPyLibrary()),
    ("torch", "Tensor", TorchLibrary()),
    ("jax", "Array", JaxLibrary()),
)
_STANDARD = StandardLibrary()
_PROTOCOLS = ("__dlpack__", "__cuda_array_interface__")

_ON_DEVICES = tuple(library for _, _, library in _BY_BASE[:2])

_known: dict[type, Library | None] = dict.fromkeys((np.ndarray, bool, int, float, complex, list, tuple, bytes, memoryview))


def library_of(value: Any) -> Library | None:
    """Return the library of an array; None for NumPy's arrays, and for anything else that NumPy reads by itself."""
    try:
        return _known[type(value)]
    except KeyError:
        return _find(value)


def device_number(library: Library) -> int:
    """Return the number, from 1, that identifies a library to other ranks when arrays on devices are made."""
    return _ON_DEVICES.index(library) + 1 if library in _ON_DEVICES else 1


def device_library(number: int) -> Library:
    """Return the library of a number; CuPy if this process has not imported that library."""
    library = _ON_DEVICES[number - 1]
    return library if library.name.lower() in sys.modules else _ON_DEVICES[0]


def present() -> list[Library]:
    """Return the libraries of arrays on devices that this process has imported and may use."""
    return [library for library in _ON_DEVICES if library.name.lower() in sys.modules and library.uses_devices()]


def _find(value: Any) -> Library | None:
    kind = type(value)
    if isinstance(value, np.ndarray | np.generic):
        _known[kind] = None
        return None
    for module, base, library in _BY_BASE:
        found = getattr(sys.modules.get(module), base, None)
        if isinstance(found, type) and isinstance(value, found):
            _known[kind] = library
            return library
    if any(hasattr(kind, name) for name in _PROTOCOLS):
        _known[kind] = _STANDARD
        return _STANDARD
    # An attribute of one object may be missing from the next of the same type.
    return _STANDARD if any(hasattr(value, name) for name in _PROTOCOLS) else None
