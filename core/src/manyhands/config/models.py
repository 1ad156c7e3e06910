"""Configs as pydantic has them, and without it: a table that needs no pydantic becomes a dataclass at once.

A config is a frozen dataclass, such as `Settings`, or a pydantic model, as those of many plugins. What pydantic does with a dataclass is done by a
model that is made of it here, when a value must be turned into its type or is wrong. Importing pydantic and making models of it is
what takes longest when a rank starts, and most ranks have a table that is empty, or whose values are right as they stand.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Hashable

    from pydantic import BaseModel, ValidationError

__all__ = ["as_dict", "as_it_stands", "check", "is_config", "model_of"]

_NUMBER: Final = re.compile(r"\d{1,15}(\.\d{1,15})?", re.ASCII)


def _is_texts(value: object) -> bool:
    return type(value) is list and all(type(each) is str and each.isascii() for each in value)


def _is_tables(value: object) -> bool:
    return (
        type(value) is dict
        and _is_texts(list(value))
        and all(type(table) is dict and _is_texts(list(table)) for table in value.values())
    )


_RIGHT: Final[dict[str, Callable[[Any], bool]]] = {
    # A text that is no ASCII may hold half a character, which is an error.
    "str": lambda value: type(value) is str and value.isascii(),
    "bool": lambda value: type(value) is bool,
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) is float,
    "None": lambda value: value is None,
    "list[str]": _is_texts,
    "dict[str, str]": lambda value: type(value) is dict and _is_texts([*value, *value.values()]),
    "dict[str, dict[str, Any]]": _is_tables,
}
"""Of the types, as fields write them: what pydantic would leave as it is."""

_HOLDS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "description": lambda *_: True,
    "check": lambda value, function: function(value) is value,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "allow_inf_nan": lambda value, allowed: allowed or math.isfinite(value),
}
"""What the metadata of a field says of its value. All but ``"check"``, a function that is given the value first, are words of `pydantic.Field`."""


def is_config(kind: object) -> bool:
    """Tell whether this is a class of configs: a frozen dataclass or a subclass of `BackendConfig`."""
    if not isinstance(kind, type):
        return False
    if is_dataclass(kind):  # also where only a base is one, whose fields are all that counts
        params = vars(kind).get("__dataclass_params__")
        return params is not None and bool(params.frozen)
    from manyhands.contract.config import BackendConfig

    return issubclass(kind, BackendConfig)


def check(kind: type[object], table: object) -> tuple[Any, ValidationError | None]:
    """Return a table as a config, or None and what pydantic finds wrong with it."""
    config = as_it_stands(kind, table)
    if config is not None:
        return config, None
    from pydantic import ValidationError

    try:
        return _made(kind, model_of(kind).model_validate(table)), None
    except ValidationError as error:
        return None, error


def as_it_stands(kind: type[object], table: object) -> Any:
    """Return a table as a config, where pydantic would change nothing and complain of nothing; None where it must be asked."""
    if not is_dataclass(kind) or not isinstance(table, dict):
        return None
    known = {field.name: field for field in fields(kind)}
    values = {key: _value(known[key], value) for key, value in table.items() if key in known}
    needed = [field.name for field in known.values() if field.default is MISSING and field.default_factory is MISSING]
    if len(values) < len(table) or any(value is MISSING for value in values.values()) or not values.keys() >= set(needed):
        return None
    return kind(**values)


def _value(field: Field[Any], value: object) -> Any:
    """Return the value of a field; MISSING where pydantic must be asked."""
    inner = _table(field)
    if inner is not None:
        config = as_it_stands(inner, value)
        return MISSING if config is None else config
    types = str(field.type).split(" | ")
    numbers = [each for each in (float, int) if each.__name__ in types]
    number = numbers[0] if len(numbers) == 1 else None  # where both are right, an int stays one
    # As a variable of the environment has it, and a file that says `60` where `60.0` is meant.
    if number is not None and (type(value) is int or ("str" not in types and type(value) is str and _NUMBER.fullmatch(value))):
        try:
            value = number(value)
        except (ValueError, OverflowError):
            return MISSING
    try:
        is_right = any(each in _RIGHT and _RIGHT[each](value) for each in types)
        limits = () if value is None else field.metadata.items()
        if not is_right or not all(name in _HOLDS and _HOLDS[name](value, limit) for name, limit in limits):
            return MISSING
    except ValueError:  # of a check
        return MISSING
    return value.copy() if isinstance(value, list | dict) else value


def model_of(kind: Any) -> type[BaseModel]:
    """Return the pydantic model of a class of configs."""
    if not is_dataclass(kind):
        return kind  # type: ignore[no-any-return] # a subclass of BackendConfig: see `is_config`
    made: type[BaseModel] = _model_of_dataclass(cast("Hashable", kind))
    return made


@functools.cache
def _model_of_dataclass(kind: Any) -> type[BaseModel]:
    import typing

    from pydantic import BeforeValidator, Field, create_model

    from manyhands.contract.config import BackendConfig

    hints = typing.get_type_hints(kind, include_extras=True)
    members: dict[str, Any] = {}
    for field in fields(kind):
        words: dict[str, Any] = dict(field.metadata)
        hint, factory = hints[field.name], field.default_factory
        if inner := _table(field):
            hint = factory = model_of(inner)
        if "check" in words:
            hint = typing.Annotated[hint, BeforeValidator(words.pop("check"))]
        if factory is not MISSING:
            words["default_factory"] = factory
        elif field.default is not MISSING:
            words["default"] = field.default
        members[field.name] = (hint, Field(**words))
    return create_model(kind.__name__, __base__=BackendConfig, __doc__=kind.__doc__, __module__=kind.__module__, **members)


def _made(kind: type[object], model: Any) -> Any:
    """Return a model as what it is the model of."""
    if not is_dataclass(kind):
        return model
    values = {}
    for field in fields(kind):
        value, inner = getattr(model, field.name), _table(field)
        values[field.name] = value if inner is None else _made(inner, value)
    return kind(**values)


def as_dict(config: Any) -> dict[str, Any]:
    """Return the values of a config as nested dicts."""
    values: dict[str, Any] = asdict(config) if is_dataclass(type(config)) else config.model_dump()
    return values


def _table(field: Field[Any]) -> type[object] | None:
    """Return the config that a field holds as a table of its own, whose default it makes; None where it holds a value."""
    factory: Any = field.default_factory
    return factory if isinstance(factory, type) and is_dataclass(factory) else None
