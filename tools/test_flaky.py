"""Run the suite of `make test` many times beside a load, and show each test that did not pass every time.

Each run has a seed of its own, for Hypothesis and for Python's hashes. A load is a number of processes that compute without end; this program
starts them, and they end with it. What a run leaves, its results as JUnit XML and its output, stays in a folder; `--resume` takes up a folder
whose runs were interrupted. Ctrl-C ends the run that is going on, and shows what the others found. `make test-flaky` is the way to run it.

Usage: python tools/test_flaky.py [--runs 20] [--loads 0,4,8] [--tests PATH ...] [--resume FOLDER] [--write FILE.md]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
SUITE = ("-n", "3", "-m", "not peers and not gpu and not engines and not site and not long", "--hypothesis-profile=short")
"""The options of `make test`."""
OF_A_RUN = ("-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")  # the older family names the file of each test
THE_RUN = "(the run itself)"
"""What a failure is ascribed to that belongs to no test."""
PATIENCE_S = 30.0
"""How long a run may take to end once it is told to."""
BUSY = """
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    sum(range(1_000_000))
"""


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    Attributes
    ----------
    runs
        How often at each load.
    loads
        Numbers of busy processes.
    seed
        Of the first run; each further one has the next.
    tests
        Paths or node ids; none for the whole suite.
    limit_s
        After how many seconds a run is ended, which counts as a failure.
    """

    runs: int = 20
    loads: tuple[int, ...] = (0, 4, 8)
    seed: int = 1
    tests: tuple[str, ...] = ()
    limit_s: float = 7200.0

    def all_runs(self) -> list[tuple[int, int]]:
        """Return the load and the seed of each run, loads in turn, so that an interrupted plan knows something about each."""
        return [
            (load, self.seed + number * len(self.loads) + place)
            for number in range(self.runs)
            for place, load in enumerate(self.loads)
        ]


@dataclass(frozen=True)
class Failure:
    """A test that failed in one run, and the first line that says how."""

    test: str
    line: str


@dataclass(frozen=True)
class Run:
    """What came of one run.

    Attributes
    ----------
    load
        The number of busy processes.
    seed
        Of Hypothesis and of Python's hashes.
    passed
        How many tests passed.
    failures
        The tests that failed.
    wall_s, cpu_s
        Seconds; the second are those of the suite alone.
    """

    load: int
    seed: int
    passed: int
    failures: tuple[Failure, ...]
    wall_s: float
    cpu_s: float

    def __str__(self) -> str:
        return (
            f"load {self.load}, seed {self.seed}: {self.passed} passed, {len(self.failures)} failed, "
            f"{self.wall_s:.0f} s, {self.cpu_s:.0f} s of CPU"
        )


def node_id(case: ET.Element) -> str:
    """Return the name by which pytest runs a test of a JUnit file of the family xunit1."""
    file, classes, name = case.get("file", ""), case.get("classname", ""), case.get("name", "")
    if not classes:
        return file or name  # a file that could not be collected
    module = file.removesuffix(".py").replace("/", ".")
    inner = classes.removeprefix(module).strip(".") if classes.startswith(module) else ""
    return "::".join([file, *(inner.split(".") if inner else []), name])


def read_results(xml: str) -> tuple[int, tuple[Failure, ...]]:
    """Return how many tests of a JUnit file passed, and those that failed.

    Raises
    ------
    xml.etree.ElementTree.ParseError
        The text is no XML: the run died while it wrote.
    """
    passed = 0
    failures: dict[str, Failure] = {}
    for case in ET.fromstring(xml).iter("testcase"):  # noqa: S314 - our own file
        bad = [part for part in case if part.tag in {"failure", "error"}]
        name = node_id(case)
        if bad:
            text = bad[0].get("message") or bad[0].text or ""
            failures.setdefault(name, Failure(name, next((line.strip() for line in text.splitlines() if line.strip()), "")))
        elif not any(part.tag == "skipped" for part in case):
            passed += 1
    return passed, tuple(failures.values())


def judge(xml: str | None, code: int, limit_s: float | None, last_line: str) -> tuple[int, tuple[Failure, ...]]:
    """Return how many tests passed, and what failed, the run itself included.

    Parameters
    ----------
    xml
        The JUnit file, None if there is none.
    code
        The exit code of pytest.
    limit_s
        The seconds after which the run was ended, None if it ended by itself.
    last_line
        Of its output.
    """
    passed = 0
    failures: tuple[Failure, ...] = ()
    with contextlib.suppress(ET.ParseError):
        passed, failures = read_results(xml) if xml else (0, ())
    if limit_s is not None:
        failures = (*failures, Failure(THE_RUN, f"did not end within {limit_s:.0f} s; {last_line}"))
    elif code not in (0, 1) or (code == 1 and not failures):
        failures = (*failures, Failure(THE_RUN, f"exit code {code}; {last_line}"))
    return passed, failures


def repeating(run: Run, tests: Sequence[str]) -> str:
    """Return the command that repeats a run, its load included."""
    words = ["--runs", "1", "--loads", str(run.load), "--seed", str(run.seed), *(["--tests", *tests] if tests else [])]
    return f".venv/bin/python tools/test_flaky.py {shlex.join(words)}"


def cell(text: str, width: int = 160) -> str:
    """Return a text as it can stand in a cell of a Markdown table."""
    return (text if len(text) <= width else text[: width - 1] + "…").replace("|", "\\|")


def table(runs: Sequence[Run], tests: Sequence[str]) -> str:
    """Return in Markdown each run, and each test that did not pass every time, the worst first."""
    lines = ["| load | seed | passed | failed | seconds | of CPU |", "|---:|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {run.load} | {run.seed} | {run.passed} | {len(run.failures)} | {run.wall_s:.0f} | {run.cpu_s:.0f} |" for run in runs
    ]
    if not runs:
        return "No run has ended."
    found: dict[str, list[tuple[Run, str]]] = {}
    for run in runs:
        for failure in run.failures:
            found.setdefault(failure.test, []).append((run, failure.line))
    if not found:
        return "\n".join([*lines, "", f"Every test passed in each of {len(runs)} runs."])
    lines += ["", "| test | failed | at loads (times) | seeds | first line of the failure (times) | the first such run again |"]
    lines += ["|---|---:|---|---|---|---|"]
    for test, times in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        loads = Counter(run.load for run, _ in times)
        said = Counter(line for _, line in times)
        row = [
            cell(test, 1000),
            f"{len(times)} of {len(runs)}",
            ", ".join(f"{load} ({count} of {sum(run.load == load for run in runs)})" for load, count in sorted(loads.items())),
            ", ".join(str(run.seed) for run, _ in times),
            "<br>".join(f"{cell(line)} ({count})" for line, count in said.most_common()),
            f"`{cell(repeating(times[0][0], tests), 1000)}`",
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


@contextlib.contextmanager
def load(count: int) -> Iterator[list[int]]:
    """Keep so many processes busy; give their process ids.

    They leave this program's session, so that Ctrl-C is for it alone, and end by themselves if it dies.
    """
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    busy: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            busy.append(subprocess.Popen(command, start_new_session=True))  # noqa: PERF401 - those that began are ended
        yield [process.pid for process in busy]
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a run, so that pytest writes what it knows, and kill whatever is left of it."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_of_children() -> float:
    """Return the seconds of CPU of all processes that were waited for, those that they waited for included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def perform(plan: Plan, busy: int, seed: int, folder: Path) -> Run:
    """Make one run, and leave in the folder what came of it."""
    name = folder / f"load-{busy}-seed-{seed}"
    xml, log = name.with_suffix(".xml"), name.with_suffix(".log")
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *SUITE, *OF_A_RUN, f"--hypothesis-seed={seed}", f"--junitxml={xml}", *plan.tests]
    storage = tempfile.TemporaryDirectory(prefix="oneaccord-flaky-")  # else an example that failed would fail in each later run
    more = {"PYTHONHASHSEED": str(seed % 2**32), "HYPOTHESIS_STORAGE_DIRECTORY": storage.name}
    with storage, load(busy), log.open("wb") as output:
        began, used = time.monotonic(), cpu_of_children()
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **more}, stdout=output, stderr=output, start_new_session=True
        )
        limit_s = None
        try:
            process.wait(plan.limit_s)
        except subprocess.TimeoutExpired:
            limit_s = plan.limit_s
        finally:
            end(process)
        wall_s, cpu_s = time.monotonic() - began, cpu_of_children() - used
    text = xml.read_text(encoding="utf-8", errors="replace") if xml.exists() else None
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "no output")
    run = Run(busy, seed, *judge(text, process.returncode, limit_s, last), wall_s, cpu_s)
    whole = name.with_suffix(".part")
    whole.write_text(json.dumps(asdict(run)), encoding="utf-8")
    whole.rename(name.with_suffix(".json"))  # which says that the run has ended
    return run


def finished(folder: Path) -> dict[tuple[int, int], Run]:
    """Return the runs of a folder that have ended, by load and seed."""
    found = {}
    for path in folder.glob("load-*.json"):
        told = json.loads(path.read_text(encoding="utf-8"))
        told["failures"] = tuple(Failure(**failure) for failure in told["failures"])
        run = Run(**told)
        found[run.load, run.seed] = run
    return found


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says."""
    plan = Plan()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=plan.runs, help="at each load (%(default)s)")
    parser.add_argument(
        "--loads",
        type=lambda text: tuple(map(int, text.replace(",", " ").split())),
        default=plan.loads,
        metavar="0,4,8",
        help="numbers of busy processes",
    )
    parser.add_argument("--seed", type=int, default=plan.seed, help="of the first run (%(default)s)")
    parser.add_argument("--tests", nargs="+", default=(), metavar="TEST", help="paths or node ids; by default the whole suite")
    parser.add_argument("--limit", type=float, default=plan.limit_s, metavar="SECONDS", help="of one run (%(default)s)")
    parser.add_argument("--folder", type=Path, help="for what the runs leave; by default a new temporary one")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="make what is left of the plan in this folder")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables there as well, in Markdown")
    return parser.parse_args(words)


def prepare(asked: argparse.Namespace) -> tuple[Plan, Path]:
    """Return the plan and its folder, an old one or a new one."""
    if asked.resume:
        told = json.loads((asked.resume / "plan.json").read_text(encoding="utf-8"))
        return Plan(**{**told, "loads": tuple(told["loads"]), "tests": tuple(told["tests"])}), asked.resume
    plan = Plan(asked.runs, asked.loads, asked.seed, tuple(asked.tests), asked.limit)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="oneaccord-flaky-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
    return plan, folder


def on_terminate(_number: int, _frame: FrameType | None) -> None:
    """End as at Ctrl-C, so that no busy process and no run stays."""
    raise KeyboardInterrupt


def main(words: Sequence[str]) -> int:
    """Make the runs and print the tables; return 1 if anything failed, 130 if they were interrupted."""
    asked = read_arguments(words)
    plan, folder = prepare(asked)
    done = finished(folder) if asked.resume else {}
    left = [each for each in plan.all_runs() if each not in done]
    print(
        f"{len(left)} runs beside {', '.join(map(str, plan.loads))} busy processes; what they leave is in {folder}", flush=True
    )
    again = f"{sys.executable} tools/test_flaky.py --resume {shlex.quote(str(folder))}"
    print(
        f"the whole suite takes about nine minutes on two idle cores, and longer beside a load; Ctrl-C, and later: {again}",
        flush=True,
    )
    interrupted = False
    try:
        for busy, seed in left:
            done[busy, seed] = run = perform(plan, busy, seed, folder)
            print(run, *(f"    {failure.test}: {failure.line[:120]}" for failure in run.failures), sep="\n", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print(f"\ninterrupted; to go on: {again}")
    runs = [done[each] for each in plan.all_runs() if each in done]
    text = table(runs, plan.tests)
    print(f"\n{text}")
    if asked.write:
        asked.write.write_text(text + "\n", encoding="utf-8")
    return 130 if interrupted else int(any(run.failures for run in runs))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, on_terminate)
    sys.exit(main(sys.argv[1:]))
