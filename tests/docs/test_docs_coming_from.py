"""docs/coming-from.md names what there is: every call in it has a method of that name, which takes those arguments."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import oneaccord as oa

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"
OWNERS: dict[str, Any] = {"group": oa.Group, "batch": oa.Group, "mesh": oa.DeviceMesh, "work": oa.Work, "oa": oa}


def code() -> Iterator[str]:
    """Yield the code of the right column of each table, where it is Python."""
    for row in re.findall(r"^\|.*\|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        for text in re.findall(r"`([^`]+)`", row):
            program = text.replace("...", "").rstrip(":") + (": pass" if text.startswith("with ") else "")
            try:
                ast.parse(program)
            except SyntaxError:  # `counts=`
                continue
            yield program


def test_every_name_and_argument_on_the_page_is_there() -> None:
    seen = 0
    for program in code():
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OWNERS:
                owner = OWNERS[node.value.id]
                is_there = hasattr(owner, node.attr) or f"self.{node.attr}:" in inspect.getsource(owner)
                assert is_there, f"{program}: no {node.attr}"
                seen += 1
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                owner = OWNERS.get(node.func.value.id)
                if owner is None or any(isinstance(argument, ast.Starred) for argument in node.args):
                    continue
                method = getattr(owner, node.func.attr)
                receiver = [None] if inspect.isclass(owner) else []
                given = {word.arg: None for word in node.keywords if word.arg}
                try:
                    inspect.signature(method).bind_partial(*receiver, *[None] * len(node.args), **given)
                except TypeError as error:
                    pytest.fail(f"{program}: {error}")
    assert seen > 60
