"""The import rule: the checker, which `make check` runs on the repository, catches each way of breaking it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.scripts import module_of

CLEAN = {
    "core/src/oneaccord/__init__.py": "from oneaccord.group import Group\n",
    "core/src/oneaccord/errors.py": "import typing\nif typing.TYPE_CHECKING:\n    import torch\n",
    "core/src/oneaccord/api.py": "from oneaccord.errors import Anything\n",
    "core/src/oneaccord/schedule/__init__.py": "",
    "core/src/oneaccord/schedule/steps.py": "import enum\nfrom oneaccord.errors import Anything\n",
    "core/src/oneaccord/group.py": "from oneaccord import errors\nfrom oneaccord.schedule.steps import Step\n",
    "core/src/oneaccord/cli/__init__.py": "import typer\nfrom oneaccord.group import Group\n",
    "lab/src/oneaccord_lab/__init__.py": "",
    "lab/src/oneaccord_lab/drawing/__init__.py": "from oneaccord.schedule.steps import Step\n",
    "lab/src/oneaccord_lab/commands/__init__.py": "import typer\nfrom oneaccord.group import Group\nfrom oneaccord_lab import drawing\n\ndef show():\n    import rich\n",
    "parallel/src/oneaccord_parallel/__init__.py": "from oneaccord import Group\n",
    "parallel/src/oneaccord_parallel/arrays.py": "import oneaccord\nfrom oneaccord.errors import Anything\n",
    "parallel/src/oneaccord_parallel/gradients.py": "from oneaccord_parallel.arrays import x\n",
    "plugins/one/src/oneaccord_one/__init__.py": "from oneaccord.api import Backend\nfrom oneaccord_one.parts import x\n",
    "plugins/one/src/oneaccord_one/parts.py": "x = 1\n",
    "plugins/two/src/oneaccord_two/__init__.py": "from oneaccord import api\n",
}

Check = Callable[[dict[str, str]], list[str]]


@pytest.fixture
def check(repository: Path, tmp_path: Path) -> Check:
    """Write a clean tree with some files changed, and return what the checker says of it."""

    def run(changed: dict[str, str]) -> list[str]:
        for name, text in {**CLEAN, **changed}.items():
            path = tmp_path / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return module_of(repository / "tools" / "check_imports.py").check(tmp_path / "tree")

    return run


def test_a_clean_tree_passes_with_imports_of_other_packages_for_types_and_inside_functions(check):
    assert check({}) == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (
            "core/src/oneaccord/errors.py",
            "import oneaccord.group\n",
            "errors.py:1: errors imports group, which does not stand below it",
        ),
        ("core/src/oneaccord/errors.py", "from oneaccord import group\n", "errors imports group"),
        ("core/src/oneaccord/errors.py", "from . import group\n", "errors imports group"),
        (
            "core/src/oneaccord/errors.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from oneaccord.group import Group\n",
            "errors.py:3: errors imports group",
        ),
        (
            "core/src/oneaccord/errors.py",
            "def f():\n    from oneaccord.group import Group\n",
            "errors.py:2: errors imports group",
        ),
        ("core/src/oneaccord/errors.py", "try:\n    import oneaccord.group\nexcept ImportError:\n    pass\n", "imports group"),
        ("core/src/oneaccord/errors.py", "class A:\n    from oneaccord import Group\n", "the package oneaccord itself"),
        ("core/src/oneaccord/errors.py", "import oneaccord_one\n", "oneaccord imports oneaccord_one; reach it by name"),
        (
            "core/src/oneaccord/cli/__init__.py",
            "def f():\n    import oneaccord_lab.drawing\n",
            "oneaccord imports oneaccord_lab",
        ),
        ("lab/src/oneaccord_lab/drawing/__init__.py", "import oneaccord_one\n", "oneaccord_lab imports oneaccord_one"),
        (
            "lab/src/oneaccord_lab/bench/__init__.py",
            "import oneaccord_lab.commands\n",
            "bench imports commands, which does not stand below it",
        ),
        (
            "lab/src/oneaccord_lab/drawing/__init__.py",
            "import oneaccord.group\n",
            "drawing may import only drawing, errors, schedule",
        ),
        (
            "lab/src/oneaccord_lab/drawing/__init__.py",
            "import typer\n",
            "typer is for oneaccord.cli and oneaccord_conformance.commands and oneaccord_lab.commands and oneaccord_parallel.commands alone",
        ),
        ("lab/src/oneaccord_lab/commands/__init__.py", "import rich\n", "rich must be imported inside the function"),
        (
            "parallel/src/oneaccord_parallel/arrays.py",
            "from oneaccord.schedule.steps import Step\n",
            "oneaccord_parallel imports oneaccord and oneaccord.errors alone, and this one oneaccord.schedule.steps",
        ),
        (
            "parallel/src/oneaccord_parallel/arrays.py",
            "import oneaccord_parallel.gradients\n",
            "arrays imports gradients, which does not stand below it",
        ),
        ("lab/src/oneaccord_lab/attic.py", "", "the room 'attic' has no place yet: put it into LAB_ROWS"),
        ("plugins/one/src/oneaccord_one/parts.py", "import oneaccord_lab\n", "the plugin oneaccord_one imports oneaccord_lab"),
        (
            "core/src/oneaccord/errors.py",
            "def f():\n    import rich.table\n",
            "rich is for oneaccord_conformance.commands and oneaccord_lab.commands and oneaccord_parallel.checkpoint alone",
        ),
        (
            "core/src/oneaccord/__init__.py",
            "import typer\n",
            "typer is for oneaccord.cli and oneaccord_conformance.commands and oneaccord_lab.commands and oneaccord_parallel.commands alone",
        ),
        ("core/src/oneaccord/group.py", "import torch\n", "torch must be imported inside the function"),
        (
            "core/src/oneaccord/schedule/steps.py",
            "from oneaccord.api import x\n",
            "schedule may import only common, errors, schedule",
        ),
        ("core/src/oneaccord/attic.py", "", "the room 'attic' has no place yet"),
        ("plugins/one/src/oneaccord_one/parts.py", "import oneaccord\n", "a plugin imports oneaccord.api alone"),
        ("plugins/one/src/oneaccord_one/parts.py", "from oneaccord import Group\n", "this one oneaccord"),
        ("plugins/one/src/oneaccord_one/parts.py", "def f():\n    import oneaccord.errors\n", "this one oneaccord.errors"),
        ("plugins/one/src/oneaccord_one/parts.py", "import oneaccord_two\n", "the plugin oneaccord_one imports oneaccord_two"),
    ],
)
def test_each_way_of_breaking_the_rule_is_found(check, file, text, said):
    assert said in "\n".join(check({file: text}))


@pytest.mark.parametrize("closing", ["", "def f():\n    ", "import typing\nif typing.TYPE_CHECKING:\n    "])
def test_a_circle_inside_a_room_is_found_and_shown_however_it_is_closed(check, closing):
    words = check(
        {
            "core/src/oneaccord/schedule/steps.py": closing + "from oneaccord.schedule import verify\n",
            "core/src/oneaccord/schedule/verify.py": "from oneaccord.schedule.steps import Step\n",
        }
    )
    assert (
        "a circle of imports: oneaccord.schedule.steps -> oneaccord.schedule.verify; "
        "oneaccord.schedule.verify -> oneaccord.schedule.steps"
    ) in words


def test_one_run_tells_all_circles_and_nothing_else(check):
    words = check(
        {
            "core/src/oneaccord/schedule/a.py": "from oneaccord.schedule import b\n",
            "core/src/oneaccord/schedule/b.py": "from oneaccord.schedule import c\n",
            "core/src/oneaccord/schedule/c.py": "from oneaccord.schedule import a, steps\n",
            "core/src/oneaccord/errors.py": "import oneaccord.errors\n",
            "plugins/one/src/oneaccord_one/parts.py": "from oneaccord_one import x\n",
        }
    )
    assert [line.removeprefix("a circle of imports: ") for line in words] == [
        "oneaccord.errors -> oneaccord.errors",
        "oneaccord.schedule.a -> oneaccord.schedule.b; oneaccord.schedule.b -> oneaccord.schedule.c; oneaccord.schedule.c -> oneaccord.schedule.a",
        "oneaccord_one -> oneaccord_one.parts; oneaccord_one.parts -> oneaccord_one",
    ]
