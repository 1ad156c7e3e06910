"""Objects as YAML, for people to read and for ``kubectl apply``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["as_yaml"]

_PLAIN = re.compile(r"[A-Za-z][\w./-]*\Z", re.ASCII)
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})  # of YAML 1.1 too
_NOT_SHOWN = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def as_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return objects of strings, numbers, lists and mappings as a stream of YAML documents."""
    return "".join(f"---\n{''.join(_lines(each, ''))}" for each in objects)


def _lines(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{indent}{_scalar(key)}:", item, indent + "  ")
    else:
        for item in value:
            inner = (
                list(_lines(item, indent + "  "))
                if item and isinstance(item, Mapping | list | tuple)
                else [_scalar(item) + "\n"]
            )
            yield f"{indent}- {inner[0].lstrip()}"
            yield from inner[1:]


def _entry(head: str, item: Any, indent: str) -> Iterator[str]:
    if item and isinstance(item, Mapping | list | tuple):
        yield head + "\n"
        yield from _lines(item, indent)
    else:
        yield f"{head} {_scalar(item)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.match(value) and value.lower() not in _WORDS:
        return value
    # What JSON writes of one value, YAML reads; but for characters that it wants escaped.
    return _NOT_SHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
