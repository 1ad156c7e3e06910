"""The pages: what they link to is there, and the threat model names tests and files that exist; each action of a workflow has a full hash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LINK = re.compile(r"(?<!!)\[[^\]\[]*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def pages(repository: Path) -> list[Path]:
    """The pages that people read."""
    places = ["*.md", "docs/**/*.md", "*/README.md", "plugins/*/README.md"]
    return sorted({page for place in places for page in repository.glob(place)})


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page, as a forge makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: dict[str, int] = {}
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = LINK.sub(lambda link: link[0][1:].partition("]")[0], title)
        name = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
        if found[name]:
            found[f"{name}-{found[name]}"] = 0
    return set(found) | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def has_heading(page: Path, anchor: str) -> bool:
    """Whether a page has a heading; those of what the site generates are checked when it is built."""
    return anchor in anchors(page) or "<!-- generated: " in page.read_text(encoding="utf-8")


def test_links_lead_to_files_and_headings_that_are_there(repository):
    broken = []
    for page in pages(repository):
        for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            if "://" in target or target.startswith("mailto:"):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists() or (anchor and file.suffix == ".md" and not has_heading(file, anchor)):
                broken.append(f"{page.relative_to(repository)}: {target}")
    assert len(pages(repository)) > 30
    assert broken == []


def test_prose_has_lines_of_at_most_120_characters(repository):
    """A table row and a word that cannot be parted may be longer."""
    long = []
    for page in sorted(repository.glob("docs/**/*.md")):
        text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            is_prose = not line.lstrip().startswith(("|", "![")) and len(line.split()) > 2
            if is_prose and len(line) > 120:
                long.append(f"{page.relative_to(repository)}:{number}")
    assert long == []


def test_the_threat_model_names_files_and_tests_that_are_there(repository):
    named = re.findall(
        r"`([\w/]+\.(?:py|c|lock))(?:::(\w+))?`",
        (repository / "docs" / "explanation" / "threat-model.md").read_text(encoding="utf-8"),
    )
    assert len([test for _, test in named if test]) >= 20
    missing = []
    for file, test in named:
        path = repository / file
        if not path.exists() or (
            test and not re.search(rf"^(async )?def {test}\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        ):
            missing.append(f"{file}::{test}")
    assert missing == []


@pytest.mark.parametrize("name", ["audit", "check", "release", "tests", "wheels"])
def test_a_workflow_takes_actions_by_hash_and_has_no_rights_but_those_of_its_jobs(repository, name):
    text = (repository / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    actions = re.findall(r"^ *(?:- )?uses: (.*)$", text, re.MULTILINE)
    assert [use for use in actions if not re.match(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$|\./", use)] == []
    assert re.search(r"^permissions: \{\}$", text, re.MULTILINE)
    assert text.count("uses: actions/checkout@") == text.count("persist-credentials: false")
