"""Configs of backends: pydantic models, and the frozen dataclasses of plugins, of which models are made here."""

from __future__ import annotations

import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, create_model

__all__ = ["BackendConfig", "as_kind", "is_config", "model_of"]


class BackendConfig(BaseModel):
    """The base of a backend's config model, a pydantic model. Instances are frozen, and unknown keys are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")
    """Pydantic's settings."""


def is_config(kind: object) -> bool:
    """Return whether this is a class of configs: a subclass of `BackendConfig`, or a frozen dataclass."""
    if not isinstance(kind, type):
        return False
    params = vars(kind).get("__dataclass_params__")  # not those of a base, whose fields would be all that counts
    return issubclass(kind, BackendConfig) or (params is not None and bool(params.frozen))


def model_of(kind: type[Any]) -> type[BaseModel]:
    """Return the model that checks a class of configs; the metadata of a dataclass's field are arguments of `pydantic.Field`."""
    if issubclass(kind, BackendConfig):
        return kind
    hints, members = typing.get_type_hints(kind, include_extras=True), {}
    for each in fields(kind):
        words = dict(each.metadata)
        if each.default_factory is not MISSING:
            words["default_factory"] = each.default_factory
        elif each.default is not MISSING:
            words["default"] = each.default
        members[each.name] = (hints[each.name], Field(**words))
    made: type[BaseModel] = create_model(  # type: ignore[call-overload] # the members are known when this runs
        kind.__name__, __base__=BackendConfig, __doc__=kind.__doc__, __module__=kind.__module__, **members
    )
    return made


def as_kind(kind: type[Any], config: BaseModel) -> Any:
    """Return a checked config in the type that its plugin expects."""
    return kind(**{name: getattr(config, name) for name in type(config).model_fields}) if is_dataclass(kind) else config
