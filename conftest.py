"""No test may hang the suite.

The timeout of pytest-timeout is a signal, for which Python has a handler: it ends the test alone, but not one that is stuck where no line of
Python runs. So a watchdog that needs no Python ends the whole process a little later, shows where all threads are, and pytest-xdist, where
tests run in its workers, goes on with another worker. It looks at the threads while they run, which can end in a segmentation fault: one
behind a line "Timeout (...)!" says nothing about the code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fault_tools import Nursery

with contextlib.suppress(ModuleNotFoundError):  # the environments of the peers need none
    from hypothesis import settings

    # An example that takes long says something about the computer, which other programs use as well, and nothing about the code.
    settings.register_profile("manyhands", deadline=None)
    settings.register_profile("short", deadline=None, max_examples=40)  # of `make test`
    settings.load_profile("manyhands")

# A shell that starts the tests in the background lets them ignore SIGINT, and every program under test would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_PATIENCE = 1.25
"""How many times the test's own timeout each of its phases may last."""
_LIMIT = pytest.StashKey[float]()
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep standard error, before output is captured."""
    config.stash[_STDERR] = os.dup((sys.__stderr__ or sys.stderr).fileno())


def pytest_collection_finish() -> None:
    """Spare what was imported and collected from all collections of garbage to come: they took a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Nursery:
    """Starts ranks that are processes."""
    from fault_tools import Nursery

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
