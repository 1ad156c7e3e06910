"""docs/guides/gallery.md: each program runs as the page shows and prints what it shows, and has a picture with a text."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
SECTIONS = re.split(r"^(?=## )", (DOCS / "guides" / "gallery.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
NAMES = [re.search(r"pictures/gallery/(\w+)\.svg", section)[1] for section in SECTIONS]
NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?"


LONG = {"checkpoint", "elastic", "pipeline", "sharded"}
"""What trains for seconds; test_gallery.py has less of the same programs, and of the training here `make test` has digits."""


def sections():
    """The programs; that in torch is marked, since `make test` has no torch."""
    return [
        pytest.param(
            section, id=name, marks=[pytest.mark.peers] if name == "torch_ddp" else [pytest.mark.long] * (name in LONG)
        )
        for name, section in zip(NAMES, SECTIONS, strict=True)
    ]


def assert_prints(found, shown):
    """Compare words exactly, and numbers to what rounding may change: a hundredth, or what is tiny."""
    assert re.sub(NUMBER, "#", found) == re.sub(NUMBER, "#", shown)
    for one, other in zip(re.findall(NUMBER, found), re.findall(NUMBER, shown), strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-2, abs=1e-7), found


@pytest.mark.parametrize("section", sections())
def test_a_program_prints_what_the_page_shows(section, repository, run_python):
    (console,) = re.findall(r"^```console\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    for command, shown in re.findall(r"^\$ ([^\n]+)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE):
        words = command.replace("examples/", f"{repository}/examples/").split()
        answer = run_python(*(["-m", *words] if words[0] == "oneaccord" else words[1:]))
        assert answer.returncode == 0, answer.stderr
        of_launcher = [line for line in shown.splitlines(keepends=True) if line.startswith("oneaccord run:")]
        assert_prints(answer.stdout, shown.replace("".join(of_launcher), "") if of_launcher else shown)
        for line in of_launcher:
            assert line in answer.stderr


def test_the_page_has_every_program_of_the_gallery_once(repository):
    programs = {path.stem for path in (repository / "examples" / "gallery").glob("*.py")} - {"digits_data"}
    assert len(NAMES) == len(programs) == 15
    assert set(NAMES) == programs
    for name, section in zip(NAMES, SECTIONS, strict=True):
        assert f"[{name}.py](../../examples/gallery/{name}.py)" in section


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_small_and_says_what_it_shows(name):
    path = DOCS / "pictures" / "gallery" / f"{name}.svg"
    assert path.stat().st_size < 30_000
    picture = ET.fromstring(path.read_text(encoding="utf-8"))
    assert all(picture.findtext(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "desc"))
    text = re.search(rf"!\[([^\]]+)\]\(\.\./pictures/gallery/{name}\.svg\)", "".join(SECTIONS))
    assert text is not None
    assert len(text[1]) > 40
