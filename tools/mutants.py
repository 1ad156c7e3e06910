"""Make small mutants of the source, one at a time, and see which of them no test finds.

A mutant flips a comparison, swaps `and` and `or`, negates a condition, changes a number or a truth value, or drops a statement. A seed chooses
among all places, as many of each kind. For each mutant the tests of its package run, until the first that fails, in a throw-away copy of HEAD:
what is not committed is not in it. `--base REV` runs the tests of another revision against the same mutants, and `--against` shows what
another report found and this one does not. Programs that tests start with an environment of their own see the source without the mutant.

Usage: python tools/mutants.py [--seed 1] [--count 200] [--only PATH ...] [--tests PATH ...] [--base REV] [--write NAME] [--against FILE.json]
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = (
    *("-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"),
    *(
        "-m",
        "not peers and not gpu and not engines and not site and not long",
        "--hypothesis-profile=short",
        "--hypothesis-seed=0",
    ),
)
TIMES, LEAST_S = 5, 60.0
"""A mutant has so many times the time of the run without one, and at least so long."""
BACKENDS = "conformance/tests/test_conformance_backends.py"
OVER_BACKENDS = (
    "tests/groups/test_group_*.py",
    "tests/faults/test_faults_*.py",
    "tests/elastic/test_shrink*.py",
    "tests/groups/test_contract_promises.py",
)
TESTS: Mapping[str, Sequence[str]] = {
    "core": ("core/tests", "tests", "plugins/simulated/tests", "plugins/tcp/tests", "plugins/shm/tests", "lab/tests", BACKENDS),
    "conformance": ("conformance/tests",),
    "lab": ("lab/tests", "tests/workspace/test_bench_*.py", "tests/docs/test_simulated_predictions.py"),
    "native": ("native/tests", *OVER_BACKENDS),
    "parallel": ("parallel/tests", "tests/docs/test_examples_*.py"),
    "plugins/hybrid": ("plugins/hybrid/tests", "tests/groups/test_group_*.py", BACKENDS),
    "plugins/nccl": ("plugins/nccl/tests", "tests/devices/test_devices*.py", "tests/devices/test_gpu_programs.py"),
    "plugins/shm": ("plugins/shm/tests", *OVER_BACKENDS, BACKENDS),
    "plugins/simulated": ("plugins/simulated/tests", "tests/groups/test_group_*.py", BACKENDS),
    "plugins/tcp": (
        "plugins/tcp/tests",
        "tests/security/test_tls.py",
        "tests/security/test_wire_tampering.py",
        *OVER_BACKENDS,
        BACKENDS,
    ),
}
"""The tests of each distribution's source, nearest first; those of a plugin that is not named here are its own."""
SUMMARY = re.compile(r"(?:FAILED|ERROR) (.*?\[.*?\](?= - |$)|\S+)")
"""A line of pytest about a test that failed: its name, which may end in brackets that hold anything, and a message."""
HELD = ("tests", "*/tests", "plugins/*/tests", "conftest.py", "pyproject.toml")
"""What `--base` takes from another revision."""

FLIPPED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Site:
    """A place where a source can be changed, and how.

    Attributes
    ----------
    kind
        "comparison", "and or", "condition", "constant" or "statement".
    line
        Where it begins, from 1 on.
    begin, end
        What is replaced, in bytes of the text as UTF-8.
    text
        What comes in its place.
    """

    kind: str
    line: int
    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant: "found", "timed out" or "survived", and the test that found it."""

    file: str
    line: int
    kind: str
    diff: str
    what: str
    test: str
    seconds: float

    @property
    def key(self) -> tuple[str, str]:
        """What tells this mutant from all others."""
        return self.file, self.diff


def _names_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING"


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and ast.unparse(test.left) == "__name__"


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Return the children of a node in which changes mean something."""
    if isinstance(node, ast.JoinedStr):  # Python 3.11 does not know where its parts are
        return
    if isinstance(node, ast.Assign) and any(isinstance(each, ast.Name) and each.id == "__all__" for each in node.targets):
        return
    if isinstance(node, ast.If) and (_names_type_checking(node.test) or _is_main(node.test)):
        yield from node.orelse
        return
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not docstring:
                yield child


def _comparison(node: ast.AST) -> str | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed = copy.deepcopy(node)
        changed.ops = [FLIPPED[type(node.ops[0])]()]
        return ast.unparse(changed)
    return None


def _and_or(node: ast.AST) -> str | None:
    if isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return ast.unparse(changed)
    return None


def _constant(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, bool | int | float):
        return None
    if isinstance(node.value, bool):
        return str(not node.value)
    return str(node.value + 1) if isinstance(node.value, int) or not node.value else repr(node.value * 2)


def _statement(node: ast.AST) -> str | None:
    """Drop a statement whose effect lasts; without the name that it binds, the next line would fail anyway."""
    kept = isinstance(node, ast.Assign) and not all(isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets)
    dropped = isinstance(node, ast.Expr | ast.AugAssign | ast.Assign | ast.Raise | ast.Delete | ast.Continue | ast.Break)
    return "pass" if dropped and not kept and not _yields(node) else None


def _yields(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield | ast.YieldFrom)


def _negated(test: ast.expr) -> str | None:
    flipped = isinstance(test, ast.Constant) or (isinstance(test, ast.Compare) and len(test.ops) == 1)
    if flipped or _names_type_checking(test):
        return None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return f"({ast.unparse(test.operand)})"
    return f"(not ({ast.unparse(test)}))"


CHANGES: Mapping[str, Callable[[ast.AST], str | None]] = {
    "comparison": _comparison,
    "and or": _and_or,
    "constant": _constant,
    "statement": _statement,
}


def sites(text: str) -> list[Site]:
    """Return all places where a module can be changed, from top to bottom."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Site] = []

    def note(kind: str, node: ast.expr | ast.stmt, changed: str | None) -> None:
        if changed is not None and node.end_lineno is not None and node.end_col_offset is not None:
            begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            found.append(Site(kind, node.lineno, begin, end, changed))

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.expr | ast.stmt):
            for kind, change in CHANGES.items():
                note(kind, node, change(node))
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            note("condition", node.test, _negated(node.test))
        for child in _parts(node):
            visit(child)

    visit(ast.parse(text))
    return sorted(found, key=lambda site: (site.begin, site.end, site.kind))


def mutated(text: str, site: Site) -> str:
    """Return the text with one change."""
    source = text.encode()
    return (source[: site.begin] + site.text.encode() + source[site.end :]).decode()


def difference(file: str, text: str, site: Site) -> str:
    """Return the change as a diff."""
    lines = difflib.unified_diff(text.splitlines(), mutated(text, site).splitlines(), file, file, lineterm="", n=1)
    return "\n".join(list(lines)[2:])


def choose(texts: Mapping[str, str], count: int, seed: int) -> list[tuple[str, Site]]:
    """Choose mutants of some files by a seed, each kind as often as another one while there are any."""
    kinds: dict[str, list[tuple[str, Site]]] = {}
    for file in sorted(texts):
        for site in sites(texts[file]):
            kinds.setdefault(site.kind, []).append((file, site))
    chance = random.Random(seed)  # noqa: S311 - no secret
    for places in kinds.values():
        chance.shuffle(places)
    chosen: list[tuple[str, Site]] = []
    while len(chosen) < count and any(kinds.values()):
        chosen += [kinds[kind].pop() for kind in sorted(kinds) if kinds[kind]]
    return chosen[:count]


def tests_of(file: str, root: Path) -> tuple[str, ...]:
    """Return the paths of the tests of a source file that are there."""
    package = file.partition("/src/")[0]
    wanted = TESTS.get(package, (f"{package}/tests",))
    return tuple(dict.fromkeys(str(path.relative_to(root)) for each in wanted for path in sorted(root.glob(each))))


def report(outcomes: Sequence[Outcome], about: str, before: Sequence[Outcome] = ()) -> str:
    """Return in Markdown how many mutants were found, and each that was not; before them those that ``before`` had found."""
    counts = Counter(outcome.what for outcome in outcomes)
    text = [f"{len(outcomes)} mutants, {about}: {', '.join(f'{counts[what]} {what}' for what in WHATS)}.", ""]
    text += ["| kind | found | survived | timed out |", "|---|---:|---:|---:|"]
    for kind in sorted({outcome.kind for outcome in outcomes}):
        of_it = Counter(outcome.what for outcome in outcomes if outcome.kind == kind)
        text.append(f"| {kind} | {' | '.join(str(of_it[what]) for what in WHATS)} |")
    known = {outcome.key for outcome in before if outcome.what != "survived"}
    lost = [outcome for outcome in outcomes if outcome.what == "survived" and outcome.key in known]
    if before:
        text += ["", f"Found before, and not now: {len(lost)}."]
    rest = [outcome for what in ("survived", "timed out") for outcome in outcomes if outcome.what == what]
    for outcome in [*lost, *(each for each in rest if each not in lost)]:
        heading = f"## {outcome.what}: {outcome.file}:{outcome.line} ({outcome.kind})"
        text += ["", heading + (", found before" if outcome in lost else ""), "", "```diff", outcome.diff, "```"]
    return "\n".join(text)


WHATS = ("found", "survived", "timed out")


class Bench:
    """A throw-away copy of the repository, in which mutants are tested.

    Parameters
    ----------
    root
        The copy.
    options
        Of pytest.
    """

    def __init__(self, root: Path, options: Sequence[str]) -> None:
        self.root = root
        self._options = options
        self._clean: dict[tuple[str, ...], tuple[float, list[str]]] = {}
        self._written = 1_000_000_000

    def test(self, tests: Sequence[str], limit_s: float | None, *more: str) -> tuple[int | None, list[str], float]:
        """Run tests; return the exit code, None if the time was up, the lines of the output, and the seconds."""
        sources = [str(path) for each in ("*/src", "plugins/*/src") for path in sorted(self.root.glob(each))]
        command = [sys.executable, "-m", "pytest", *self._options, *more, *tests]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="oneaccord-mutants-") as storage, tempfile.TemporaryFile("w+") as output:
            # An example that found one mutant would find the next one sooner.
            environ = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "HYPOTHESIS_STORAGE_DIRECTORY": storage}
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environ,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            code: int | None = None
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read().splitlines(), time.monotonic() - began

    def clean(self, tests: tuple[str, ...]) -> tuple[float, list[str]]:
        """Run tests without a mutant, once; return the seconds, and the names of those that fail already."""
        if tests not in self._clean:
            print(f"without a mutant: {' '.join(tests)}", flush=True)
            code, lines, seconds = self.test(tests, None)
            failing = failed(lines)
            if code not in (0, 1) or bool(code) != bool(failing):
                sys.exit("\n".join([*lines[-20:], f"the tests cannot be run (exit code {code})"]))
            print(f"    {seconds:.0f} s" + "".join(f"\n    fails already: {name}" for name in failing), flush=True)
            self._clean[tests] = seconds, failing
        return self._clean[tests]

    def write(self, file: str, text: str) -> None:
        """Write a source file with a time of its own, by which Python tells what it has compiled."""
        self._written += 1
        (self.root / file).write_text(text, encoding="utf-8")
        os.utime(self.root / file, (self._written, self._written))

    def judge(self, file: str, site: Site, tests: tuple[str, ...]) -> Outcome:
        """Test one mutant."""
        clean_s, failing = self.clean(tests)
        text = (self.root / file).read_text(encoding="utf-8")
        self.write(file, mutated(text, site))
        try:
            limit_s = max(TIMES * clean_s, LEAST_S)
            code, lines, seconds = self.test(tests, limit_s, "-x", *(f"--deselect={name}" for name in failing))
        finally:
            self.write(file, text)
        what = "timed out" if code is None else "found" if code else "survived"
        test = next(iter(failed(lines)), "") or (f"exit code {code}" if code else "")
        return Outcome(file, site.line, site.kind, difference(file, text, site), what, test, round(seconds, 1))


def failed(lines: Sequence[str]) -> list[str]:
    """Return the names of the tests that pytest's summary calls failed."""
    found = (SUMMARY.match(line) for line in lines)
    return list(dict.fromkeys(match[1] for match in found if match))


def git(*words: str | Path) -> str:
    """Run git in the repository; return what it printed."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S607


@contextlib.contextmanager
def copy_of_head(base: str | None) -> Iterator[Path]:
    """Make a copy of HEAD, with the tests of another revision if one is given."""
    if git("status", "--porcelain", "--untracked-files=no"):
        print("what is not committed is left out")
    with tempfile.TemporaryDirectory(prefix="oneaccord-mutants-") as folder:
        root = Path(folder) / "tree"
        git("worktree", "add", "--quiet", "--detach", root, "HEAD")
        try:
            for compiled in ROOT.glob("*/src/*/*.so"):
                shutil.copy(compiled, root / compiled.relative_to(ROOT))
            if base:
                held = [str(path.relative_to(root)) for each in HELD for path in root.glob(each)]
                git("-C", root, "rm", "-r", "--quiet", *held)
                git("-C", root, "checkout", "--quiet", git("rev-parse", base), "--", *held)
            yield root
        finally:
            git("worktree", "remove", "--force", root)


def sources(root: Path, only: Sequence[str]) -> dict[str, str]:
    """Return the texts of the source files, of all or of those below some paths."""
    paths = [path for each in ("*/src", "plugins/*/src") for path in sorted(root.glob(f"{each}/**/*.py"))]
    names = {str(path.relative_to(root)): path for path in paths if "template" not in path.parts}
    chosen = {
        name: path
        for name, path in names.items()
        if not only or any(f"{name}/".startswith(f"{each.rstrip('/')}/") for each in only)
    }
    return {name: path.read_text(encoding="utf-8") for name, path in chosen.items()}


def read(path: Path) -> list[Outcome]:
    """Return the outcomes of a report."""
    return [Outcome(**told) for told in json.loads(path.read_text(encoding="utf-8"))]


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1, help="chooses the mutants (%(default)s)")
    parser.add_argument("--count", type=int, default=200, help="how many (%(default)s)")
    parser.add_argument("--only", nargs="+", default=(), metavar="PATH", help="source files or folders; by default all")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="instead of those of the package")
    parser.add_argument("--base", metavar="REV", help="take the tests of this revision")
    parser.add_argument("--workers", default="2", help="processes that run tests (%(default)s)")
    parser.add_argument(
        "--write", type=Path, metavar="NAME", help="write NAME.json and NAME.md; what NAME.json holds is not tested again"
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help="the JSON of an earlier report, to compare with")
    return parser.parse_args(words)


def on_terminate(_number: int, _frame: FrameType | None) -> None:
    """End as at Ctrl-C, so that the copy goes and no test stays."""
    raise KeyboardInterrupt


def main(words: Sequence[str]) -> int:
    """Test the mutants and write the report; return 0, or 130 if that was interrupted."""
    asked = read_arguments(words)
    before = read(asked.against) if asked.against else []
    files = [asked.write.with_suffix(f".{kind}") for kind in ("json", "md")] if asked.write else []
    old = {outcome.key: outcome for outcome in read(files[0])} if files and files[0].exists() else {}
    about = f"seed {asked.seed}, source {git('rev-parse', '--short', 'HEAD')}, tests {git('rev-parse', '--short', asked.base or 'HEAD')}"
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        with copy_of_head(asked.base) as root:
            bench = Bench(root, [*OPTIONS, "-n", asked.workers])
            texts = sources(root, asked.only)
            chosen = choose(texts, asked.count, asked.seed)
            print(f"{len(chosen)} mutants, {about}", flush=True)
            for number, (file, site) in enumerate(chosen, 1):
                key = file, difference(file, texts[file], site)
                outcome = old.get(key) or bench.judge(file, site, tuple(asked.tests or tests_of(file, root)))
                outcomes.append(outcome)
                print(
                    f"{number}: {outcome.what} {file}:{site.line} ({site.kind}) {outcome.test}, {outcome.seconds} s", flush=True
                )
                if files:
                    files[0].write_text(json.dumps([asdict(each) for each in outcomes], indent=1), encoding="utf-8")
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted" + (f"; the same command goes on behind mutant {len(outcomes)}" if files else ""))
    text = report(outcomes, about, before)
    print(f"\n{text}")
    if files:
        files[1].write_text(text + "\n", encoding="utf-8")
    return 130 if interrupted else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, on_terminate)
    sys.exit(main(sys.argv[1:]))
