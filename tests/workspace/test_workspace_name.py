"""The checker of the project's name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.scripts import module_of

FORMER = "Many" + "hands"  # in two parts, so that this file does not bear it


def found(repository: Path, tree: Path) -> list[str]:
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
    return module_of(repository / "tools" / "check_name.py").check(tree)


@pytest.mark.parametrize("spelling", [FORMER, FORMER.upper(), FORMER.lower() + "-tcp", "many" + "-hands"])
def test_name_in_a_line_is_found(repository: Path, tmp_path: Path, spelling: str) -> None:
    (tmp_path / "page.md").write_text(f"a line\npip install {spelling}\n")
    assert found(repository, tmp_path) == [f"page.md:2: pip install {spelling}"]


def test_name_of_a_file_is_found(repository: Path, tmp_path: Path) -> None:
    (tmp_path / f"{FORMER.lower()}.toml").touch()
    assert found(repository, tmp_path) == [f"{FORMER.lower()}.toml: the file's name is the former one"]


def test_name_is_told_from_the_motto(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("Many hands make light work.\n")
    assert found(repository, tmp_path) == []
