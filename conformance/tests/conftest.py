"""Which tests of the suite take long by nature, or repeat on one backend what another one shows; and the backends of the folder `broken`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oneaccord_conformance import patience

sys.path.insert(0, str(Path(__file__).resolve().parent / "broken"))  # also for the factory, which core imports by its name

_PROCESSES = ("death_", "close_processes_end")
_CORE = (
    *("bytes_every_dtype", "bytes_every_layout", "bytes_every_shape", "bytes_every_world", "bytes_floats", "bytes_in_place"),
    *("bytes_inputs", "bytes_mixtures", "bytes_objects", "bytes_reductions", "bytes_structured", "bytes_uneven"),
    *("messages_dtype", "messages_every_layout", "messages_objects", "mismatches_what"),
)
"""What core does in front of any transport: `make test` has it on tcp."""
_PARTS = ("leaks_calls", "leaks_groups", "leaks_failures", "leaks_worlds")
"""What the two parts of hybrid show by themselves."""
_WORLDS = ("close_", "leaks_", "messages_every_pair", "mismatches_calls", "mismatches_messages")
"""What makes many worlds: on the simulated backend, a world is a process as well."""
_LONG = {
    "TestShm": (*_PROCESSES, *_CORE),
    "TestHybrid": (*_PROCESSES, *_CORE, *_PARTS),
    "TestSimulated": (*_WORLDS, *_CORE),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave that to `make test-all`. Each test may last longer than a check lets a program of a backend that hangs."""
    here = Path(__file__).resolve().parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(2.5 * patience.PROGRAM_S))
        kind = getattr(getattr(item, "cls", None), "__name__", "")
        if item.name.startswith(tuple(f"test_{check}" for check in _LONG.get(kind, ()))):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module", autouse=True)
def few_objects_of_others(few_objects: None) -> None:
    """Let the checks for leaks, which collect garbage again and again, look at few objects."""


@pytest.fixture(scope="session")
def loft() -> str:
    """Register the backend with defects, once in this process; give its name."""
    import broken_loft
    import broken_natives

    from oneaccord.config.plugins import get_plugin_manager

    get_plugin_manager().register(broken_loft, "loft")
    get_plugin_manager().register(broken_natives.Natives(), "natives of loft")
    return "loft"
