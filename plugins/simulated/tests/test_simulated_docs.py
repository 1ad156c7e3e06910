"""docs/guides/testing*.md and the READMEs: their programs are run, and do what is shown."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import preloaded

import oneaccord as oa
import oneaccord_simulated
from oneaccord_simulated import FaultPlan, run

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
GUIDES = DOCS / "guides"
PAGES = {name: (GUIDES / f"{name}.md").read_text() for name in ("testing", "testing-explore", "testing-rules")}


class Block(NamedTuple):
    """A block of code of the page."""

    language: str
    text: str

    @property
    def file(self) -> str:
        """The file that it is, by its first line; empty if it is none."""
        named = re.match(r"# ([\w.]+\.(?:py|toml))\n", self.text)
        return named[1] if named else ""


def blocks_of(text: str) -> list[Block]:
    """Return the blocks whose language is named."""
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


SECTIONS = {
    f"{name}: {section.splitlines()[0].strip('# ')}": blocks
    for name, page in PAGES.items()
    for section in re.split(r"^(?=###? )", page, flags=re.MULTILINE)
    if (blocks := blocks_of(section))
}


@pytest.mark.parametrize("blocks", SECTIONS.values(), ids=SECTIONS)
def test_what_the_page_shows_is_what_happens(blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, command, names = tmp_path, "", {}
    for block in blocks:
        if block.file:
            file = tmp_path / block.file
            file.write_text(block.text)
        elif block.language == "python":
            check_prompts(block.text, names)
        elif block.language == "console":
            command, shown = re.fullmatch(r"\$ ([^\n]+)\n(.*)", block.text, re.DOTALL).groups()
            code, printed = execute(command)
            is_shown = matches(printed, shown)
            assert is_shown, f"{command} ends with {code} and prints\n{printed}\nand the page shows\n{shown}"
        else:
            assert block.language == "diff"
            assert code, f"{file.name} is said to be wrong, and {command} finds nothing"
            lines = block.text.splitlines(keepends=True)
            before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in ("- ", "+ "))
            assert file.read_text().count(before) == 1, f"the page corrects what is not in {file.name}:\n{before}"
            file.write_text(file.read_text().replace(before, after))
            code, printed = execute(command)
            assert not code, f"the correction of {file.name} does not help:\n{printed}"


def check_prompts(text: str, names: dict[str, Any]) -> None:
    """Run lines that begin with >>>; ``names`` are those of the section so far."""
    example = doctest.DocTestParser().get_doctest(text, names, "testing.md", "testing.md", 0)
    assert example.examples
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append, clear_globs=False)
    names |= example.globs
    said = "".join(told)
    assert not said, said


def execute(command: str) -> tuple[int, str]:
    """Run a command; return its exit code and what it prints, without the marks under lines that pytest and Python draw."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ONEACCORD_", "PYTEST_"))}
    environ |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}",
        "NO_COLOR": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if command.startswith("pytest "):
        modules = preloaded.OF_PYTEST
        done = preloaded.run(["-m", *command.split()], cwd=Path.cwd(), environ=environ, modules=modules, merged=True)
    else:
        words, out = ["/bin/sh", "-c", command], subprocess.PIPE
        done = subprocess.run(words, env=environ, stdout=out, stderr=subprocess.STDOUT, text=True, timeout=40, check=False)
    printed = done.stdout.replace(f"{Path.cwd()}{os.sep}", "")
    return done.returncode, re.sub(r"^[ E]*[~^]+\n", "", printed, flags=re.MULTILINE)


def matches(printed: str, shown: str) -> bool:
    """Compare an output with what is shown of it: a line ``...`` stands for any others, and how long pytest took does not matter."""
    parts = [
        re.escape(part)
        for part in re.split(
            r"^\.\.\.\n", re.sub(r"in \d+\.\d+s$", "in a moment", shown, flags=re.MULTILINE), flags=re.MULTILINE
        )
    ]
    return bool(re.fullmatch(r"(?:.*\n)*?".join(parts), re.sub(r"in \d+\.\d+s$", "in a moment", printed, flags=re.MULTILINE)))


# The READMEs


def test_the_readme_of_the_plugin_is_right(world):
    test, prompts = blocks_of((ROOT / "plugins" / "simulated" / "README.md").read_text())
    names: dict[str, Any] = {}
    exec(test.text, names)
    names["test_total"](world)
    check_prompts(prompts.text, {})


def test_the_readme_of_all_is_right(world):
    (test,) = (block for block in blocks_of((ROOT / "README.md").read_text()) if "(world)" in block.text)

    def train(group: oa.Group) -> float:
        for step in range(3):
            group.mark(f"step {step}")
            group.all_reduce(group.rank)
            for _ in range(calls - 1):
                group.all_reduce(1.0)
        return 1.0

    names: dict[str, Any] = {"train": train}
    exec(test.text, names)
    calls = 2
    names["test_train"](world)
    calls = 3
    with pytest.raises(AssertionError, match="rank 0 called all_reduce 3 times in step 0"):
        names["test_train"](world)


# The tables about faults

FAULTS = re.findall(r"^\| [^|`]+ \| `(\w+\(.*?)` \| `(\w+ = .*?)` \|$", PAGES["testing-explore"], re.MULTILINE)
SEEN = {
    "Kill(rank=2, at_s=0.25)": (oa.PeerLostError, "rank 2 was lost", 0.3),
    'Kill(rank=2, operation="all_reduce", nth=2)': (oa.PeerLostError, "rank 2 was lost", 0.3),
    "Pause(rank=2, at_s=0.25)": (oa.DeadlineError, "rank 2 did not answer", 60.7),
    "Pause(rank=2, at_s=0.25, for_s=5)": (None, "", 5.35),
    "Slow(rank=2, factor=5)": (None, "", 2.0),
    "Cut(links=[(0, 2)], from_s=0.25)": (oa.PeerLostError, "rank 2 was lost", 10.25),
    "Cut(links=[(2, 3)], from_s=0.25)": (oa.DeadlineError, "all ranks were in it, and rank 1 waited for rank 3", 60.3),
    'Cut(links=[(2, "*")], from_s=0.25, until_s=5.25)': (None, "", 5.35),
    "Partition(sides=[(0, 1), (2, 3)], from_s=0.25)": (oa.PeerLostError, "ranks 2-3 were lost", 10.25),
    'Delay(links=[(2, "*")], by_s=0.05)': (None, "", 0.8),
    "Drop(source=0, dest=1, nth=1)": (oa.ProtocolError, "message 1 from rank 0 to rank 1, of 8000 bytes, was lost", 0.4),
    "Corrupt(source=0, dest=1, nth=1)": (
        oa.ProtocolError,
        "message 1 from rank 0 to rank 1, of 8000 bytes, came with another",
        0.2,
    ),
}


def test_the_table_of_faults_has_every_kind():
    kinds = {type(fault).__name__ for plan in map(plan_of, dict(FAULTS)) for fault in plan.faults}
    assert kinds == {"Kill", "Pause", "Slow", "Cut", "Partition", "Delay", "Drop", "Corrupt"}
    assert dict(FAULTS).keys() == SEEN.keys()


@pytest.mark.parametrize(("python", "toml"), FAULTS)
def test_a_fault_is_the_same_in_python_and_in_a_file(python, toml, tmp_path):
    (tmp_path / "faults.toml").write_text(toml)
    assert FaultPlan.load(tmp_path / "faults.toml") == plan_of(python)


@pytest.mark.parametrize("python", SEEN)
def test_all_ranks_see_of_a_fault_what_the_page_says_and_when(python):
    def train(group: oa.Group) -> None:
        for _ in range(4):
            group.compute(0.1)
            group.all_reduce(np.ones(1000))

    done = run(train, 4, faults=plan_of(python), check=False)
    error, words, when = SEEN[python]
    killed_or_still = {2} if error and python.startswith(("Kill", "Pause")) else set()
    assert {rank: type(each) for rank, each in done.errors.items()} == {
        rank: error for rank in range(4) if error and rank not in killed_or_still
    }
    assert len({str(each) for each in done.errors.values()}) <= 1
    assert all(words in str(each) for each in done.errors.values())
    assert done.trace.end_of(done.trace.calls_of(0)[-1]) == pytest.approx(when)


def plan_of(python: str) -> FaultPlan:
    return FaultPlan.of(eval(python, {name: getattr(oneaccord_simulated, name) for name in oneaccord_simulated.__all__}))


# What is said in passing


def test_what_takes_time_on_the_clock():
    assert run(lambda group: oa.sleep(2), 2).duration_s == 2
    assert run(lambda group: group.compute(2), 2, faults=plan_of("Slow(rank=1, factor=3)")).duration_s == 6
    assert run(lambda group: oa.sleep(2), 2, faults=plan_of("Slow(rank=1, factor=3)")).duration_s == 2
