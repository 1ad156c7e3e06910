"""The values that the state of an elastic function may hold, and the form in which it travels to ranks that come later.

Everything in a commit arrives unchanged on another rank: tuples as tuples, arrays of torch as such, one array in two places as one array. The
form is a list of nodes, each with a kind and its data, in which children are numbers of other nodes.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from oneaccord.arrays.dtypes import check_dtype
from oneaccord.arrays.libraries import DeviceArray, Library, library_of
from oneaccord.contract.header import can_describe
from oneaccord.errors import DTypeError, OneAccordError, UsageError

__all__ = ["check", "packed", "unpacked"]

Node = list[Any]
_LEAVES = (type(None), bool, float, str, bytes)
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict}
_LIBRARIES = {"torch": "torch", "JAX": "jax", "CuPy": "cupy"}
"""The libraries whose arrays travel, and their modules."""
_INT64 = range(-(1 << 63), 1 << 63)
_DEEPEST = 100
"""The greatest depth of a state: Python's stack must have room for it, here and where it is unpacked."""


def check(state: Mapping[str, Any], what: str) -> None:
    """Refuse a state that could not travel; nothing is copied. Raises as `packed`."""
    _Packer(what, copies=False).add(dict(state), "state")


def packed(state: Mapping[str, Any], what: str) -> list[Node]:
    """Return a state in the form that `Group.broadcast_object` carries; arrays of the host are not copied.

    Parameters
    ----------
    state
        The state to send.
    what
        The call, for messages.

    Raises
    ------
    UsageError
        Something in it cannot travel, or not as it is; the message names it, its place, the reason and the remedy.
    """
    packer = _Packer(what, copies=True)
    packer.add(dict(state), "state")
    return packer.nodes


class _Packer:
    """Numbers the parts of a state. If it does not copy, arrays on devices are left out."""

    def __init__(self, what: str, *, copies: bool) -> None:
        self.nodes: list[Node] = []
        self._what = what
        self._copies = copies
        self._depth = 0
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []

    def add(self, value: Any, path: str) -> int:
        """Return the number of a part, which is added if it is new."""
        known = self._numbers.get(id(value))
        if known is not None:
            return known
        number = len(self.nodes)
        self.nodes.append([])
        self._numbers[id(value)] = number
        self._alive.append(value)  # so that no other object gets its identity
        if self._depth > _DEEPEST:
            raise self._refusal(path, type(value), f"it is nested more than {_DEEPEST} levels deep: give a flatter structure")
        self._depth += 1
        self.nodes[number] = self._node(value, path)
        self._depth -= 1
        return number

    def _node(self, value: Any, path: str) -> Node:
        kind = type(value)
        if kind in _LEAVES:
            return ["", self._valid_text(value, path) if kind is str else value]
        if kind is int:
            return ["", value] if value in _INT64 else ["int", str(value)]
        if kind is complex:
            return ["complex", [value.real, value.imag]]
        if kind in _SEQUENCES.values():
            return [kind.__name__, [self.add(each, f"{path}[{index}]") for index, each in enumerate(value)]]
        if kind in _MAPPINGS.values():
            return [
                kind.__name__,
                [[self.add(key, f"the key {key!r}"), self.add(each, f"{path}[{key!r}]")] for key, each in value.items()],
            ]
        if isinstance(value, np.generic):
            return ["scalar", self._travelling(np.asarray(value), path, kind)]
        if kind in (np.ndarray, np.memmap):
            return ["array", self._travelling(value, path, kind)]
        library = library_of(value)
        if library is not None and library.name in _LIBRARIES:
            return self._foreign(value, path, library)
        raise self._refusal(
            path,
            kind,
            "a state may hold None, bool, int, float, complex, str, bytes, lists, tuples, sets, dicts, and arrays of NumPy, torch, JAX and CuPy: "
            "give its data as one of these",
        )

    def _foreign(self, value: Any, path: str, library: Library) -> Node:
        """Return the node of an array of another library."""
        is_parameter = False
        if library.name == "torch":
            torch = importlib.import_module("torch")
            is_parameter = type(value) is torch.nn.Parameter
            if not is_parameter and type(value) is not torch.Tensor:
                raise self._refusal(path, type(value), "give one of its plain tensors")
            if value.requires_grad and not value.is_leaf:
                raise self._refusal(path, type(value), "it is the result of a computation with gradients: give x.detach()")
        try:
            memory = library.read(value.detach() if library.name == "torch" else value)
            is_on_device = isinstance(memory, DeviceArray)
            if isinstance(memory, DeviceArray):
                array = library.to_host(memory) if self._copies else np.empty(0, memory.dtype)
            else:
                array = memory
        except OneAccordError as error:
            raise self._refusal(path, type(value), str(error)) from None
        needs_gradient = library.name == "torch" and value.requires_grad
        return [library.name, [self._travelling(array, path, type(value)), is_on_device, needs_gradient, is_parameter]]

    def _travelling(self, array: np.ndarray[Any, Any], path: str, kind: type) -> np.ndarray[Any, Any]:
        try:
            check_dtype(array.dtype)
        except DTypeError as error:
            raise self._refusal(path, kind, str(error)) from None
        if not can_describe(array.dtype, array.ndim):
            raise self._refusal(path, kind, "its dimensions and its dtype need too long a description")
        return np.asarray(array)

    def _valid_text(self, value: str, path: str) -> str:
        try:
            value.encode()
        except UnicodeError:
            raise self._refusal(
                path, str, "it has half a surrogate pair, which UTF-8 cannot encode: give os.fsencode(x)"
            ) from None
        return value

    def _refusal(self, path: str, kind: type, why: str) -> UsageError:
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return UsageError(f"{self._what} cannot keep {path}, a {name}: {why}")


def unpacked(nodes: list[Node]) -> dict[str, Any]:
    """Return the state that `packed` has put into nodes.

    Raises
    ------
    UsageError
        A library that it needs is not installed here, or makes other arrays than those that were given.
    """
    made: dict[int, Any] = {}

    def make(number: int) -> Any:
        if number not in made:
            kind, content = nodes[number]
            if kind == "list":
                into: list[Any] = []
                made[number] = into
                into.extend(make(each) for each in content)
            elif kind in _MAPPINGS:
                made[number] = table = _MAPPINGS[kind]()
                for key, each in content:
                    table[make(key)] = make(each)
            elif kind in _SEQUENCES:
                made[number] = _SEQUENCES[kind](make(each) for each in content)
            else:
                made[number] = _MAKERS[kind](content)
        return made[number]

    state: dict[str, Any] = make(0)
    return state


def _foreign_array(name: str, content: list[Any]) -> Any:
    array, is_on_device, needs_gradient, is_parameter = content
    module = _LIBRARIES[name]
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"the state holds an array of {name}, which this rank cannot import: {error}") from None
    if name == "JAX":
        made = importlib.import_module("jax.numpy").asarray(array)
        if made.dtype != array.dtype:
            raise UsageError(
                f'JAX turns an array of {array.dtype} in the state into {made.dtype}: set jax.config.update("jax_enable_x64", True)'
            )
        return made
    if name == "CuPy":
        return library.asarray(array)
    tensor = library.empty(0)
    tensor = library_of(tensor).give(array, tensor)  # type: ignore[union-attr]
    if is_on_device:
        tensor = tensor.cuda()
    return library.nn.Parameter(tensor, needs_gradient) if is_parameter else tensor.requires_grad_(needs_gradient)


_MAKERS: Mapping[str, Callable[[Any], Any]] = {
    "": lambda content: content,
    "int": int,
    "complex": lambda content: complex(*content),
    "array": lambda content: content,
    "scalar": lambda content: content[()],
    **{name: partial(_foreign_array, name) for name in _LIBRARIES},
}
