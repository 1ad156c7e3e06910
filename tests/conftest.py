"""What the tests of the whole repository share."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.api import CommError, Group, ThreadWorld

ROOT = Path(__file__).resolve().parent.parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def repository() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """Run this Python with some arguments, in an empty folder, and return what it said."""

    def run(*arguments: str | Path, timeout_s: float = 50) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=timeout_s, check=False)

    return run


class World:
    """Runs a function on every rank of a world over one backend; the ranks are threads of this process."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def outcomes(self, function: Callable[[Group], Any], world_size: int, *, timeout_s: float = 20) -> list[Any]:
        """Call ``function(group)`` on every rank; return for each rank what it returned, or the exception that it raised."""
        world = ThreadWorld(world_size, self.backend)
        outcomes: list[Any] = [None] * world_size

        def target(rank: int) -> None:
            try:
                with world.rank(rank), mh.init(config={}, timeout_s=timeout_s) as group:
                    outcomes[rank] = function(group)
            except BaseException as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
            assert not thread.is_alive(), "a rank hangs"
        return outcomes

    def __call__(self, function: Callable[[Group], Any], world_size: int, *, timeout_s: float = 20) -> list[Any]:
        """Call ``function(group)`` on every rank; return the results, or raise the exception that is the cause of the others."""
        outcomes = self.outcomes(function, world_size, timeout_s=timeout_s)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise next((error for error in errors if not isinstance(error, CommError)), errors[0])
        return outcomes


@pytest.fixture(params=["simulated", "tcp"])
def world(request: pytest.FixtureRequest) -> World:
    """Run a function on every rank: ``world(function, world_size)``, over each backend in turn."""
    return World(request.param)
