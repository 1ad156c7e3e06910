"""docs/guides/recipes.md: each program is run as it stands there, and prints what is shown."""

from __future__ import annotations

import doctest
import re
import subprocess
from pathlib import Path

import pytest
from support import preloaded

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = {
    section.partition("\n")[0].strip("# "): re.findall(r"^```(\w+)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    for section in re.split(r"^(?=## )", PAGE, flags=re.MULTILINE)[1:]
}


def recipes() -> list[object]:
    """The sections; those that need a library that `make test` does not have are marked."""
    return [
        pytest.param(blocks, id=title, marks=[pytest.mark.peers] if any("import torch" in text for _, text in blocks) else [])
        for title, blocks in SECTIONS.items()
    ]


@pytest.mark.parametrize("blocks", recipes())
def test_a_recipe_does_what_the_page_shows(blocks: list[tuple[str, str]], tmp_path: Path) -> None:
    ran = 0
    for language, text in blocks:
        if language == "python" and text.startswith("# "):
            (tmp_path / text.split()[1]).write_text(text, encoding="utf-8")
        elif language == "python":
            example = doctest.DocTestParser().get_doctest(text, {}, "recipes.md", "recipes.md", 0)
            assert doctest.DocTestRunner().run(example) == (0, len(example.examples))
            ran += len(example.examples)
        else:
            assert language == "console"
            for command, shown in re.findall(r"^\$ ([^\n]+)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
                words = ["-m", *command.split()] if command.startswith("oneaccord ") else command.split()[1:]
                if command.startswith(("oneaccord ", "python ")):
                    done = preloaded.run(words, cwd=tmp_path)
                else:
                    done = subprocess.run(
                        command.split(), check=False, cwd=tmp_path, capture_output=True, text=True, timeout=50
                    )
                assert (done.returncode, done.stdout, done.stderr) == (0, shown, ""), command
                ran += 1
    assert ran
