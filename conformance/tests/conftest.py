"""Which tests of the suite take long by nature."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

_PROCESSES = ("death_", "close_processes_end")
_WORLDS = ("close_", "leaks_worlds", "mismatches_calls", "mismatches_messages")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what starts many processes to `make test-all`, but for tcp; a world of the simulated backend is a process as well."""
    for item in items:
        name = getattr(getattr(item, "cls", None), "__name__", "")
        chapters = {"TestShm": _PROCESSES, "TestHybrid": _PROCESSES, "TestSimulated": _WORLDS}.get(name, ())
        if item.name.startswith(tuple(f"test_{chapter}" for chapter in chapters)):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def broken_backend() -> Iterator[str]:
    """Register the backend with faults, once in this process; give its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parent))
        import broken_backends

        broken_backends.register()
        yield "broken"
