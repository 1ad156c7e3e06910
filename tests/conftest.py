"""What the tests of the whole repository share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
