"""What the tests of the whole repository share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import preloaded
from support.worlds import HYBRIDS, must, thread_world

from oneaccord.api import Group

ROOT = Path(__file__).resolve().parent.parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def repository() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """Run this Python with some arguments, in an empty folder, and return what it said."""

    def run(*arguments: str | Path, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
        if arguments[:2] == ("-m", "oneaccord"):
            return preloaded.run(arguments, cwd=tmp_path, timeout_s=timeout_s)
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=timeout_s, check=False)

    return run


class World:
    """Runs a function on every rank of a world over one backend; the ranks are threads of this process."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def outcomes(self, function: Callable[[Group], Any], world_size: int, *, timeout_s: float = 20) -> list[Any]:
        """Call ``function(group)`` on every rank; return for each rank what it returned, or the exception that it raised."""
        return thread_world(function, world_size, self.backend, timeout_s=timeout_s)

    def __call__(self, function: Callable[[Group], Any], world_size: int, *, timeout_s: float = 20) -> list[Any]:
        """Call ``function(group)`` on every rank; return the results, or raise the exception that is the cause of the others."""
        return must(self.outcomes(function, world_size, timeout_s=timeout_s))


_OVER_ALL = frozenset(
    f"test_group_{topic}" for topic in ("async", "collectives", "point_to_point", "shortcuts", "split", "tagged", "threads")
) | {"test_window"}
"""What a backend can get wrong. The rest is core's own, and is the same over all of them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that asks for a world over each backend in turn."""
    if "world" in metafunc.fixturenames:
        more = ["shm", *HYBRIDS] if metafunc.module.__name__.rpartition(".")[2] in _OVER_ALL else []
        metafunc.parametrize("world", ["simulated", "tcp", *more], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave for `make test-all` what takes long, and what others have gone through.

    These are worlds of more than three ranks over backends that move bytes, as algorithms differ by size alone, and the hybrid of the
    two that have their turn each alone, the simulated one and the other hybrid.
    """
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        backend = given.get("world", given.get("backend", "simulated"))
        if backend == "hybrid-simulated" or (backend != "simulated" and given.get("size") in range(4, 9)):
            item.add_marker(pytest.mark.long)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Run a function on every rank: ``world(function, world_size)``, over each backend in turn."""
    return World(request.param)
