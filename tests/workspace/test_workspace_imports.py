"""The import rule: the checker, which `make check` runs on the repository, catches each way of breaking it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.scripts import module_of

CLEAN = {
    "core/src/manyhands/__init__.py": "from manyhands.group import Group\n",
    "core/src/manyhands/errors.py": "import typing\nif typing.TYPE_CHECKING:\n    import torch\n",
    "core/src/manyhands/api.py": "from manyhands.errors import Anything\n",
    "core/src/manyhands/schedule/__init__.py": "",
    "core/src/manyhands/schedule/steps.py": "import enum\nfrom manyhands.errors import Anything\n",
    "core/src/manyhands/group.py": "from manyhands import errors\nfrom manyhands.schedule.steps import Step\n",
    "core/src/manyhands/cli/__init__.py": "import typer\nfrom manyhands.group import Group\n",
    "lab/src/manyhands_lab/__init__.py": "",
    "lab/src/manyhands_lab/drawing/__init__.py": "from manyhands.schedule.steps import Step\n",
    "lab/src/manyhands_lab/commands/__init__.py": "import typer\nfrom manyhands.group import Group\nfrom manyhands_lab import drawing\n\ndef show():\n    import rich\n",
    "parallel/src/manyhands_parallel/__init__.py": "from manyhands import Group\n",
    "parallel/src/manyhands_parallel/arrays.py": "import manyhands\nfrom manyhands.errors import Anything\n",
    "parallel/src/manyhands_parallel/gradients.py": "from manyhands_parallel.arrays import x\n",
    "plugins/one/src/manyhands_one/__init__.py": "from manyhands.api import Backend\nfrom manyhands_one.parts import x\n",
    "plugins/one/src/manyhands_one/parts.py": "x = 1\n",
    "plugins/two/src/manyhands_two/__init__.py": "from manyhands import api\n",
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
            "core/src/manyhands/errors.py",
            "import manyhands.group\n",
            "errors.py:1: errors imports group, which does not stand below it",
        ),
        ("core/src/manyhands/errors.py", "from manyhands import group\n", "errors imports group"),
        ("core/src/manyhands/errors.py", "from . import group\n", "errors imports group"),
        (
            "core/src/manyhands/errors.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from manyhands.group import Group\n",
            "errors.py:3: errors imports group",
        ),
        (
            "core/src/manyhands/errors.py",
            "def f():\n    from manyhands.group import Group\n",
            "errors.py:2: errors imports group",
        ),
        ("core/src/manyhands/errors.py", "try:\n    import manyhands.group\nexcept ImportError:\n    pass\n", "imports group"),
        ("core/src/manyhands/errors.py", "class A:\n    from manyhands import Group\n", "the package manyhands itself"),
        ("core/src/manyhands/errors.py", "import manyhands_one\n", "manyhands imports manyhands_one; reach it by name"),
        (
            "core/src/manyhands/cli/__init__.py",
            "def f():\n    import manyhands_lab.drawing\n",
            "manyhands imports manyhands_lab",
        ),
        ("lab/src/manyhands_lab/drawing/__init__.py", "import manyhands_one\n", "manyhands_lab imports manyhands_one"),
        (
            "lab/src/manyhands_lab/bench/__init__.py",
            "import manyhands_lab.commands\n",
            "bench imports commands, which does not stand below it",
        ),
        (
            "lab/src/manyhands_lab/drawing/__init__.py",
            "import manyhands.group\n",
            "drawing may import only drawing, errors, schedule",
        ),
        (
            "lab/src/manyhands_lab/drawing/__init__.py",
            "import typer\n",
            "typer is for manyhands.cli and manyhands_conformance.commands and manyhands_lab.commands and manyhands_parallel.commands alone",
        ),
        ("lab/src/manyhands_lab/commands/__init__.py", "import rich\n", "rich must be imported inside the function"),
        (
            "parallel/src/manyhands_parallel/arrays.py",
            "from manyhands.schedule.steps import Step\n",
            "manyhands_parallel imports manyhands and manyhands.errors alone, and this one manyhands.schedule.steps",
        ),
        (
            "parallel/src/manyhands_parallel/arrays.py",
            "import manyhands_parallel.gradients\n",
            "arrays imports gradients, which does not stand below it",
        ),
        ("lab/src/manyhands_lab/attic.py", "", "the room 'attic' has no place yet: put it into LAB_ROWS"),
        ("plugins/one/src/manyhands_one/parts.py", "import manyhands_lab\n", "the plugin manyhands_one imports manyhands_lab"),
        (
            "core/src/manyhands/errors.py",
            "def f():\n    import rich.table\n",
            "rich is for manyhands_conformance.commands and manyhands_lab.commands and manyhands_parallel.checkpoint alone",
        ),
        (
            "core/src/manyhands/__init__.py",
            "import typer\n",
            "typer is for manyhands.cli and manyhands_conformance.commands and manyhands_lab.commands and manyhands_parallel.commands alone",
        ),
        ("core/src/manyhands/group.py", "import torch\n", "torch must be imported inside the function"),
        (
            "core/src/manyhands/schedule/steps.py",
            "from manyhands.api import x\n",
            "schedule may import only common, errors, schedule",
        ),
        ("core/src/manyhands/attic.py", "", "the room 'attic' has no place yet"),
        ("plugins/one/src/manyhands_one/parts.py", "import manyhands\n", "a plugin imports manyhands.api alone"),
        ("plugins/one/src/manyhands_one/parts.py", "from manyhands import Group\n", "this one manyhands"),
        ("plugins/one/src/manyhands_one/parts.py", "def f():\n    import manyhands.errors\n", "this one manyhands.errors"),
        ("plugins/one/src/manyhands_one/parts.py", "import manyhands_two\n", "the plugin manyhands_one imports manyhands_two"),
    ],
)
def test_each_way_of_breaking_the_rule_is_found(check, file, text, said):
    assert said in "\n".join(check({file: text}))


@pytest.mark.parametrize("closing", ["", "def f():\n    ", "import typing\nif typing.TYPE_CHECKING:\n    "])
def test_a_circle_inside_a_room_is_found_and_shown_however_it_is_closed(check, closing):
    words = check(
        {
            "core/src/manyhands/schedule/steps.py": closing + "from manyhands.schedule import verify\n",
            "core/src/manyhands/schedule/verify.py": "from manyhands.schedule.steps import Step\n",
        }
    )
    assert (
        "a circle of imports: manyhands.schedule.steps -> manyhands.schedule.verify; "
        "manyhands.schedule.verify -> manyhands.schedule.steps"
    ) in words


def test_one_run_tells_all_circles_and_nothing_else(check):
    words = check(
        {
            "core/src/manyhands/schedule/a.py": "from manyhands.schedule import b\n",
            "core/src/manyhands/schedule/b.py": "from manyhands.schedule import c\n",
            "core/src/manyhands/schedule/c.py": "from manyhands.schedule import a, steps\n",
            "core/src/manyhands/errors.py": "import manyhands.errors\n",
            "plugins/one/src/manyhands_one/parts.py": "from manyhands_one import x\n",
        }
    )
    assert [line.removeprefix("a circle of imports: ") for line in words] == [
        "manyhands.errors -> manyhands.errors",
        "manyhands.schedule.a -> manyhands.schedule.b; manyhands.schedule.b -> manyhands.schedule.c; manyhands.schedule.c -> manyhands.schedule.a",
        "manyhands_one -> manyhands_one.parts; manyhands_one.parts -> manyhands_one",
    ]
