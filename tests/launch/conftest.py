"""What the tests of launchers share: processes that `oneaccord.launch` starts here have imported all when they begin."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from support import preloaded

from oneaccord.local import forked


@pytest.fixture(scope="module", autouse=True)
def preloaded_servers() -> Iterator[None]:
    """Fork what forks ranks, too. How it begins by itself is tested by test_launch_fork.py, and by programs in processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked, "subprocess", SimpleNamespace(Popen=preloaded.Popen, DEVNULL=subprocess.DEVNULL))
        yield
