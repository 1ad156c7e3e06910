"""Messages about errors in a configuration: file, key, value, the allowed values, and the nearest valid name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, get_args

from oneaccord.common.variables import PREFIX
from oneaccord.config.plugins.installed import did_you_mean, nearest
from oneaccord.config.sources import DEFAULT, HIDDEN, Merged, Problem
from oneaccord.errors import ConfigError, UnknownBackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

__all__ = ["as_error", "from_validation", "is_secret", "problem"]

_SECRET: Final = re.compile(r"secret|password|passphrase|token|credential", re.IGNORECASE)


def is_secret(path: Sequence[str]) -> bool:
    """Return whether the value at ``path`` must not be shown; the name of a file that holds a secret may."""
    return any(_SECRET.search(key) and not key.endswith("_file") for key in path)


def problem(merged: Merged, path: Sequence[str], value: object, what: str) -> Problem:
    """Return the problem with the value at ``path``."""
    origin, key = merged.origin(path), ".".join(path)
    where = f"environment variable {origin}" if origin.startswith(PREFIX) else origin
    shown = HIDDEN if is_secret(path) else repr(value)
    return Problem(f"{where}: {key} = {shown}: {what}", origin, key, HIDDEN if is_secret(path) else value)


def from_validation(
    error: ValidationError, model: type[BaseModel], merged: Merged, above: tuple[str, ...] = ()
) -> list[Problem]:
    """Return the problem that pydantic found in the table at ``above``, which ``model`` describes."""
    problems = []
    for detail in error.errors(include_url=False):
        path = tuple(str(part) for part in detail["loc"])
        if detail["type"] == "missing":
            key, origin = ".".join(above + path), merged.origin(above + path[:-1])
            where = "configuration" if origin == DEFAULT else origin
            about = _described(model, path)
            text = f"{where}: {key} is missing, and it has no default" + (f". It says: {about}" if about else "")
            problems.append(Problem(text, origin, key))
            continue
        if detail["type"] == "extra_forbidden":
            what = _unknown_key(path, model, above)
        elif detail["type"] == "model_type":
            what = f"expected a table. It says: {_described(model, path)}"
        else:
            what = _bad_value(detail)
        problems.append(problem(merged, above + path, detail["input"], what))
    return problems


def as_error(problems: Sequence[Problem]) -> ConfigError:
    """Make one error of all problems, one per line; its attributes are those of the first."""
    first = problems[0]
    kind = UnknownBackendError if all(each.unknown_backend for each in problems) else ConfigError
    return kind("\n".join(each.text for each in problems), file=first.file, key=first.key, value=first.value)


def _unknown_key(path: tuple[str, ...], model: type[BaseModel], above: tuple[str, ...]) -> str:
    fields = _fields_at(model, path[:-1])
    if not fields:
        return "this key is unknown; nothing can be set here"
    return f"this key is unknown{did_you_mean(path[-1], fields, ''.join(f'{key}.' for key in (*above, *path[:-1])))}"


def _described(model: type[BaseModel], path: Sequence[str]) -> str:
    """Return the description of the key at ``path`` of a model, if it is one of its own."""
    field = model.model_fields.get(path[0]) if len(path) == 1 else None
    return (field.description or "") if field is not None else ""


def _fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Return the keys of the table at ``path`` of a model; none if the path leaves the models."""
    from pydantic import BaseModel

    for key in path:
        field = model.model_fields.get(key)
        candidates = [] if field is None else [field.annotation, *get_args(field.annotation)]
        inner = [each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _bad_value(detail: ErrorDetails) -> str:
    what = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").replace("Input should", "it should")
    allowed: list[Any] = re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", "")))
    close = nearest(detail["input"], allowed) if isinstance(detail["input"], str) else None
    return f"{what}; did you mean {close!r}?" if close else what
