"""A loop of the control plane for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oneaccord.net.loop import Loop

__all__ = ["loop"]


@pytest.fixture
def loop() -> Iterator[Loop]:
    crashes: list[Exception] = []
    loop = Loop("the loop of the tests", crashes.append)
    yield loop
    loop.stop()
    assert crashes == []
