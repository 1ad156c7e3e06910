"""docs/start: each program runs as the page shows, and prints what it shows; the pages of words and questions are complete."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import preloaded
from support.worlds import free_port

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the blocks of a page, as (language, text)."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(command: str, folder: Path, variables: dict[str, str]) -> tuple[str, int]:
    """Run one command of a page; return what it prints, and its exit code."""
    words = command.removesuffix(" &").split()
    if words[0] == "python":
        words = words[1:]
    elif words[0] in {"oneaccord", "pytest"}:
        words = ["-m", *words]
    else:
        pytest.fail(f"no page of docs/start may show what is not run: {command}")
    # Plugins of pytest are imported in a way of its own.
    start = subprocess.Popen if words[:2] == ["-m", "pytest"] else preloaded.Popen
    with start(
        [sys.executable, *words],
        cwd=folder,
        env=variables | {"PRELOADED_RANKS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            return process.communicate(timeout=150)[0], process.returncode
        finally:
            process.kill()


def plain(line: str) -> str:
    """Return a line without what differs from run to run."""
    return re.sub(r"\S*/(\w+\.py)", r"\1", line).rstrip()


def assert_prints(found: str, shown: str, command: str) -> None:
    """Compare lines in any order; a line of dots stands for others, and dots at the end of a line for the rest of it."""
    there = [plain(line) for line in found.splitlines()]
    for line in map(plain, shown.splitlines()):
        if line == "...":
            continue
        begin = line.removesuffix("...")
        match = next((each for each in there if each == line or (line != begin and each.startswith(begin))), None)
        assert match is not None, f"{command} does not print {line!r}, but:\n{found}"
        there.remove(match)
    if not re.search(r"^\.\.\.$", shown, re.MULTILINE):
        assert there == [], command


def perform(page: str, folder: Path) -> int:
    """Save the programs of a page and run its commands, in their order; return how many commands ran."""
    variables = dict(os.environ, ONEACCORD_SECRET=secrets.token_hex(32))
    port, code, ran = str(free_port()), 0, 0
    with ThreadPoolExecutor() as background:
        for language, text in blocks(page):
            name = re.match(r"# (\w+\.\w+)(.*)\n", text)
            if language in {"python", "toml"} and name and name[2]:  # lines for a program that is there already
                program = (folder / name[1]).read_text(encoding="utf-8")
                new = text.partition("\n")[2]
                old = f"    mine = {new.rpartition(' = ')[2].partition(',')[0].rstrip(')')})\n"
                assert old in program
                (folder / name[1]).write_text(program.replace(old, new), encoding="utf-8")
            elif language in {"python", "toml"} and name:
                (folder / name[1]).write_text(text, encoding="utf-8")
            elif language == "console":
                waiting = []
                for command, shown in re.findall(
                    r"^\$ ([^\n]+)\n((?:(?!\$ ).*\n)*)", text.replace("29500", port), re.MULTILINE
                ):
                    if command == "echo $?":
                        assert shown == f"{code}\n"
                    elif command.endswith(" &"):
                        waiting.append(background.submit(run, command, folder, variables))
                    elif not command.startswith("export ONEACCORD_SECRET="):
                        found, code = run(command, folder, variables)
                        found += "".join(job.result()[0] for job in waiting)
                        assert_prints(found, shown, command)
                        ran += 1
    return ran


@pytest.mark.parametrize("page", ["index", "tutorial", "tutorial-mpi"])
def test_a_page_of_start_prints_what_it_shows(page: str, tmp_path: Path) -> None:
    assert perform(f"start/{page}.md", tmp_path) >= 2


@pytest.mark.peers
def test_the_page_for_torch_users_prints_what_it_shows(tmp_path: Path) -> None:
    assert perform("start/tutorial-torch.md", tmp_path) >= 5


def test_install_names_every_plugin(repository: Path) -> None:
    page = (DOCS / "start" / "install.md").read_text(encoding="utf-8")
    for plugin in (repository / "plugins").iterdir():
        if (plugin / "pyproject.toml").exists():
            assert f"`{plugin.name}`" in page, plugin.name


def test_install_names_folders_and_extras_that_exist(repository: Path) -> None:
    page = (DOCS / "start" / "install.md").read_text(encoding="utf-8")
    for folder, extra in re.findall(r"-e \"?\./([\w/]+)(?:\[([\w-]+)\])?", page):
        text = (repository / folder / "pyproject.toml").read_text(encoding="utf-8")
        assert not extra or f"\n{extra} = [" in text, (folder, extra)


def test_glossary_has_its_words_in_order() -> None:
    terms = re.findall(r"^(\w[^\n]*)\n  \S", blocks_of_glossary(), re.MULTILINE)
    assert len(terms) >= 40
    assert terms == sorted(terms)
    assert {"store", "standby", "survivor", "mailbox"} <= set(terms)


def blocks_of_glossary() -> str:
    """Return the terms of the glossary, with their meaning."""
    found = re.search(
        r"^```\{glossary\}\n(.*?)^```$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    return found[1]


def test_faq_answers_twenty_questions() -> None:
    page = (DOCS / "faq.md").read_text(encoding="utf-8")
    answers = re.findall(r"^### [^\n]+\?(?: [^\n]+\?)?\n\n(\S)", page, re.MULTILINE)
    assert len(answers) >= 20
