"""No test may hang the suite, and its last lines say what to do.

The timeout of pytest-timeout is a signal, for which Python has a handler: it ends the test alone, but not one that is stuck where no line of
Python runs. So a watchdog that needs no Python ends the whole process a little later, shows where all threads are, and pytest-xdist, where
tests run in its workers, goes on with another worker. It looks at the threads while they run, which can end in a segmentation fault: one
behind a line "Timeout (...)!" says nothing about the code.

The last lines of a run say in short what was left out, and what to do about failures.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.fault_tools import Nursery

with contextlib.suppress(ModuleNotFoundError):  # the environments of the peers need none
    from hypothesis import settings

    # An example that takes long says something about the computer, which other programs use as well, and nothing about the code.
    settings.register_profile("oneaccord", deadline=None)
    settings.register_profile("short", deadline=None, max_examples=40)  # of `make test`
    settings.load_profile("oneaccord")

# A shell that starts the tests in the background lets them ignore SIGINT, and every program under test would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_PATIENCE = 1.25
"""How many times the test's own timeout each of its phases may last."""
_ALONE_S = 170.0
"""How long a process of a test of its own may last: less than the test, which kills it."""
_LIMIT = pytest.StashKey[float]()
_STDERR = pytest.StashKey[int]()
_LEFT_OUT = pytest.StashKey[Counter[str]]()
_ELSEWHERE = {
    "gpu": "that need a GPU (make test-gpu)",
    "peers": "that need torch, MPI, UCX, UCC or CuPy (make test-peers)",
    "engines": "that need a real Slurm, sshd, Ray or Dask, or the client of Kubernetes (make test-engines)",
    "long": "that take long (make test-all)",
}
"""What is left out by its marker, and how it is run; a test with two markers counts for the first."""
_FEW = 5
"""So many names of failed tests fit a command."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep standard error, before output is captured."""
    config.stash[_STDERR] = os.dup((sys.__stderr__ or sys.stderr).fileno())


def pytest_collection_finish() -> None:
    """Spare what was imported and collected from all collections of garbage to come: they took a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Spare what is there by now from the collections of garbage that tests make themselves: dozens of them are most of the time of such tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Nursery:
    """Starts ranks that are processes."""
    from support.fault_tools import Nursery

    return Nursery(tmp_path_factory.mktemp("nursery"))


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Take note of a test's timeout, wherever it is set; pytest-timeout sets its own timer all the same."""
    item.stash[_LIMIT] = settings.timeout * _PATIENCE


@contextlib.contextmanager
def _bounded(item: pytest.Item) -> Iterator[None]:
    # Anew for each phase, since pytest stops the watchdog when one fails.
    if _LIMIT in item.stash:
        faulthandler.dump_traceback_later(item.stash[_LIMIT], exit=True, file=item.config.stash[_STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked ``alone`` in a process of its own, if this one is a worker of pytest-xdist.

    A deadlock is only found if no other thread of the process could come to the rescue, and such a worker has one that it does not own.
    """
    if pyfuncitem.get_closest_marker("alone") is None or "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    from support import preloaded

    words = ["-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", pyfuncitem.nodeid]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    root = pyfuncitem.config.rootpath
    done = preloaded.run(words, cwd=root, environ=environ, modules=preloaded.OF_PYTEST, timeout_s=_ALONE_S)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Bound what comes before a test."""
    with _bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Bound a test."""
    with _bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Bound what comes after a test, also where the test has failed."""
    with _bounded(item):
        return (yield)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what is left out, by its marker; a worker of pytest-xdist passes that on at its end."""
    for item in items:
        marker = next((name for name in _ELSEWHERE if item.get_closest_marker(name)), None)
        if marker:
            item.config.stash.setdefault(_LEFT_OUT, Counter())[marker] += 1
    if items and hasattr(items[0].config, "workeroutput"):
        items[0].config.workeroutput["left out"] = dict(items[0].config.stash.get(_LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker left out, which is the same in all."""
    node.config.stash[_LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left out")) or node.config.stash.get(
        _LEFT_OUT, Counter()
    )


def _what_to_do(failed: Sequence[str], root: Path) -> Iterator[str]:
    python = os.path.relpath(sys.executable, root) if Path(sys.executable).is_relative_to(root) else sys.executable
    yield f"Failed tests alone:     {python} -m pytest {shlex.join(failed) if len(failed) <= _FEW else '--lf'}"
    files = sorted({name.partition("::")[0] for name in failed})
    which = f" --tests {shlex.join(files)}" if len(files) <= _FEW else ""
    yield f"Do they fail each time? {python} tools/test_flaky.py --runs 5{which}"
    yield "To report them, where you have the clone from (git remote -v), attach the lines from FAILURES or ERRORS on, and"
    yield f"the output of:          {Path(python).with_name('oneaccord')} doctor"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """Say last, and in a line, what was skipped and left out, and what to do about failures."""
    yield
    left_out = config.stash.get(_LEFT_OUT, Counter[str]())
    if terminalreporter.stats.get("skipped") and "s" not in terminalreporter.reportchars.lower():
        count = len(terminalreporter.stats["skipped"])
        terminalreporter.write_line(f"Skipped, for what this computer or a backend does not have: {count} (-rs tells why)")
    if left_out:
        parts = [f"{left_out[name]} {how}" for name, how in _ELSEWHERE.items() if left_out[name]]
        terminalreporter.write_line(f"Left out: {', '.join(parts)}")
    reports = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    if failed := list(dict.fromkeys(report.nodeid for report in reports)):
        terminalreporter.section("what to do", sep="-")
        for line in _what_to_do(failed, config.rootpath):
            terminalreporter.write_line(line)
