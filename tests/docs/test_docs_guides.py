"""The short guides: their programs are run as the pages show them, and print what is shown, whatever rank prints first.

A block of Python that begins with ``# NAME.py`` is a file; the commands of a ``console`` block are run beside it. ``...`` in the output of a
command stands for any text.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import preloaded

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
LIMIT_S = 120
PAGES = [
    "checkpoints",
    "debugging",
    "debugging-a-hang",
    "launch-from-python",
    "logging",
    "messages",
    "objects",
    "plugins-observer",
    "profiling",
    "services",
    "windows",
]


def chapters() -> list[object]:
    """The programs of each page with its commands; those of torch by themselves, as `make test` has no torch."""
    found = []
    for page in PAGES:
        text = (GUIDES / f"{page}.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```(python|console)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        torch = next((at for at, (_, block) in enumerate(blocks) if "import torch" in block), len(blocks))
        found.append(pytest.param(blocks[:torch], id=page))
        if blocks[torch:]:
            found.append(pytest.param(blocks[torch:], id=f"{page}-torch", marks=pytest.mark.peers))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("blocks", chapters())
def test_a_guide_does_what_it_shows(blocks: list[tuple[str, str]], tmp_path: Path) -> None:
    (bin_ := tmp_path / "bin").mkdir()
    preloaded.stand_in(bin_ / "python")
    preloaded.stand_in(bin_ / "oneaccord", "-m", "oneaccord")
    path = os.pathsep.join([str(bin_), str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = os.environ | {"PATH": path, "PRELOADED_RANKS": "1"}
    ran = 0
    for language, text in blocks:
        if language == "python":
            if name := re.match(r"# (\w+\.py)\n", text):
                (tmp_path / name[1]).write_text(text, encoding="utf-8")
            continue
        for command, shown in re.findall(r"^\$ ([^\n]+)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            done = subprocess.run(
                command, shell=True, check=False, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT_S
            )
            got, want = ("".join(sorted(each.splitlines(keepends=True))) for each in (done.stdout + done.stderr, shown))
            assert doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS), f"{command}\n{done.stdout}{done.stderr}"
            ran += 1
    assert ran


def test_a_page_installs_the_plugins_that_it_shows() -> None:
    root = GUIDES.parents[1]
    ours = {path.parent.name for path in (*root.glob("plugins/*/pyproject.toml"), *root.glob("*/pyproject.toml"))}
    missing = []
    for path in sorted((*GUIDES.glob("*.md"), *(GUIDES.parent / "start").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        backends = re.findall(r"--backend[ =](\w+)", text)
        needed = ours & {*backends, *re.findall(r"^(?:import|from) oneaccord_(\w+)", text, re.MULTILINE)}
        for line in re.findall(r"^.*pip install .*(?:\./|oneaccord\[).*$", text, re.MULTILINE):
            extras = ",".join(re.findall(r"oneaccord\[([\w,]+)\]", line)).split(",")
            lacks = needed - {*extras, *re.findall(r"\./(?:plugins/)?(\w+)", line)}
            missing += [f"{path.name}: {', '.join(sorted(lacks))} in {line.strip()}"] if lacks else []
    assert missing == []
