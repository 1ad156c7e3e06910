"""The functions of a service: the types of their arguments, and how they are called."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from oneaccord.errors import UsageError
from oneaccord_parallel.rpc.packing import Bytes, decoder, unpack

__all__ = ["Function"]

_Decoder = msgspec.msgpack.Decoder[Any]


class Function:
    """A function that others may call. Its annotations give the types of its arguments.

    Parameters
    ----------
    name
        Its name for callers.
    function
        It is called with the arguments. If its first parameter is annotated as ``own``, the service gives that one.
    own
        The class of services.
    """

    def __init__(self, name: str, function: Callable[..., Any], own: type) -> None:
        self.name: str = name
        self._function = function
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):  # some that are written in C
            self._signature = None
        hints = _hints(function)
        parameters = [] if self._signature is None else list(self._signature.parameters.values())
        self.takes_service: bool = bool(parameters) and hints.get(parameters[0].name) is own
        self._decoders = {name: _known(hint) for name, hint in hints.items()}
        self._positions: list[str] = []
        self._rest: str | None = None
        self._others: str | None = None
        for parameter in parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = parameter.name
            elif parameter.kind is parameter.VAR_KEYWORD:
                self._others = parameter.name
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                self._positions.append(parameter.name)

    def prepare(
        self, first: list[Any], args: list[Any], kwargs: Mapping[str, Any], arrays: Sequence[Bytes]
    ) -> Callable[[], Any]:
        """Return the call of the function, ready to be made.

        Parameters
        ----------
        first
            Arguments that have not travelled, which come first.
        args, kwargs
            Those that have: ``msgspec.Raw``, or objects, as which references have arrived.
        arrays
            The large arrays among the arguments.

        Raises
        ------
        UsageError
            An argument does not have the type of its annotation, or there are too few or too many.
        """
        positions = self._positions[len(first) :]
        names = [positions[place] if place < len(positions) else self._rest for place in range(len(args))]
        given = [*first, *(self._read(name, value, arrays) for name, value in zip(names, args, strict=True))]
        named = {
            name: self._read(name if name in self._decoders else self._others, value, arrays, name)
            for name, value in kwargs.items()
        }
        if self._signature is not None:
            try:
                self._signature.bind(*given, **named)
            except TypeError as error:
                raise UsageError(
                    f"{self.name!r} takes {self._signature}, and cannot be called with these arguments: {error}"
                ) from None
        return partial(self._function, *given, **named)

    def _read(self, parameter: str | None, value: Any, arrays: Sequence[Bytes], name: str = "") -> Any:
        if not isinstance(value, msgspec.Raw):
            return value
        decode = self._decoders.get(parameter or "") or decoder(None)
        return unpack(decode, value, arrays, f"the argument {name or parameter or ''!r} of {self.name!r}")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - annotations may be of any kind, and those that cannot be read say nothing
        return {}
    hints.pop("return", None)
    return hints


def _known(hint: Any) -> _Decoder:
    """Return a decoder for an annotation; for plain objects if msgspec does not know it."""
    try:
        return decoder(hint)
    except UsageError:
        return decoder(None)
