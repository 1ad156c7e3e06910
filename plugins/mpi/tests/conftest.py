"""What the tests of the mpi backend share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def run_here() -> Callable[[str], None]:
    """Run a program in a Python of its own; it must end well."""

    def run(program: str) -> None:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
        assert done.returncode == 0, done.stderr

    return run
