"""The backend over a foreign library in docs/guides/plugins-backend.md works as it stands there, over a library of this module."""

from __future__ import annotations

import re
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support.worlds import free_port, must, on_threads, thread_world

import oneaccord as oa
from oneaccord.api import BackendUnavailableError, ConfigError, Group
from oneaccord.config.plugins import get_plugin_manager


class Error(Exception):
    """What the library raises."""


class Ticket:
    """A request of the library: a receive looks for its message when it is tested, a send is done once it was taken."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._done = False

    def is_done(self) -> bool:
        self._done = self._done or self._look()
        return self._done


class Ponies:
    """The library for one rank: nothing is copied before its receive is tested."""

    roads: ClassVar[defaultdict[tuple[str, int, int, int], list[tuple[memoryview, threading.Event]]]] = defaultdict(list)

    def __init__(self, stable: str, rank: int) -> None:
        self._stable, self._rank = stable, rank

    def post(self, peer: int, tag: int, memory: bytes | memoryview) -> Ticket:
        taken = threading.Event()
        self.roads[self._stable, self._rank, peer, tag].append((memoryview(memory), taken))
        return Ticket(taken.is_set)

    def take(self, peer: int, tag: int, memory: Any) -> Ticket:
        road = self.roads[self._stable, peer, self._rank, tag]

        def look() -> bool:
            if not road:
                return False
            sent, taken = road.pop(0)
            if len(sent) > len(memory):
                raise Error("the message would be truncated")
            memoryview(memory)[: len(sent)] = sent
            taken.set()
            return True

        return Ticket(look)


@pytest.fixture(scope="module")
def backend() -> str:
    """Register the backend of the page, once in this process; give its name."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "plugins-backend.md").read_text(encoding="utf-8")
    section = page.partition("\n## Over a foreign library\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    library: Any = types.ModuleType("ponylib")
    library.VERSION, library.Error, library.ride = "1.2", Error, Ponies
    module = types.ModuleType("oneaccord_pony")
    sys.modules |= {"ponylib": library, "oneaccord_pony": module}
    exec(compile(code, "plugins-backend.md", "exec"), module.__dict__)
    get_plugin_manager().register(module, "pony")
    return "pony"


@pytest.fixture
def stable(backend: str, tmp_path: Path) -> str:
    """Return the name of a stable that no other test uses."""
    return str(tmp_path)


def world(program: Callable[[Group], Any], stables: list[str]) -> list[Any]:
    """Run ``program`` on ranks that are threads and meet as processes do; return what each returned or raised."""
    address = f"127.0.0.1:{free_port()}"

    def body(rank: int) -> Any:
        config = {"backend": "pony", "rendezvous": {"address": address}, "backends": {"pony": {"stable": stables[rank]}}}
        with oa.init(config=config, rank=rank, world_size=len(stables), timeout_s=20) as group:
            return program(group)

    return on_threads(body, len(stables))


@pytest.mark.parametrize("count", [3, 100_000])
def test_library_backend_of_the_page_performs_collectives(stable: str, count: int):
    def program(group: Group) -> tuple[Any, Any]:
        return group.all_reduce(np.arange(count) + group.rank), group.broadcast(np.full(count, group.rank), root=2)

    for total, sent in must(world(program, [stable] * 3)):
        assert (total == 3 * np.arange(count) + 3).all()
        assert (sent == 2).all()


def test_library_backend_of_the_page_names_a_mismatch(stable: str):
    for error in world(lambda group: group.all_reduce(np.ones(4 + group.rank)), [stable] * 2):
        assert isinstance(error, oa.CollectiveMismatchError)


def test_library_backend_of_the_page_ends_with_the_job(stable: str):
    def program(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("rank 1 fails")
        group.all_reduce(np.ones(4))

    waiting, failed = world(program, [stable] * 2)
    assert isinstance(failed, KeyError)
    assert isinstance(waiting, oa.AbortedError)


def test_library_backend_of_the_page_compares_settings(stable: str):
    for error in world(lambda group: None, [stable, f"{stable}/other"]):
        assert isinstance(error, ConfigError)
        assert f"backends.pony.stable is {stable} on rank 0 and {stable}/other on rank 1" in str(error)


def test_library_backend_of_the_page_refuses_threads(stable: str):
    for error in thread_world(lambda group: None, 2, "pony"):
        assert isinstance(error, BackendUnavailableError)
        assert "the ranks of the pony backend are processes" in str(error)
