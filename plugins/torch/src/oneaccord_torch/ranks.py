"""Ranks that are threads, as those of a simulated world: each has for itself what torch keeps once for a process, and waits as its world does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch.distributed import Reducer, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from oneaccord.api import Place, Runtime, UnsupportedError, Work, current_rank, current_runtime, current_world
from oneaccord_torch.stores import StoreBase

__all__ = ["NAME", "Completion", "Store", "be_rank", "within_world"]


NAME = "oneaccord"
"""What the backend is called."""


def be_rank() -> Store | None:
    """Prepare torch for the calling thread's rank, and return the store of its world; None in an ordinary program.

    What changes for the process stays changed, and does nothing where no rank is a thread.
    """
    world = current_world()
    if world is None:
        return None
    if not isinstance(distributed_c10d._world, _Worlds):
        usual = distributed_c10d._world
        distributed_c10d._world = _Worlds(usual)
        if usual.default_pg is None:  # what torch has counted is the group that this rank is making
            distributed_c10d._world.group_count, usual.group_count = usual.group_count, 0
        distributed_c10d._new_process_group_helper = _refusing(distributed_c10d._new_process_group_helper)
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # the names of groups, which C++ keeps
        torch._C.Future.wait = _waiting(torch._C.Future.wait)
        Reducer._delay_all_reduce = _hurrying(Reducer._delay_all_reduce)
        DeviceMesh.__init__ = _telling_ranks_apart(DeviceMesh.__init__)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # torch has one flight recorder for a process, which would mix the ranks
    store: Store = world.shared.setdefault("torch", Store(world.runtime))
    return store


# What torch keeps for a process


_KEPT = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
"""What torch's record of its groups keeps in its module, and not in itself."""


def _record() -> Any:
    """Return a record of groups like torch's, which keeps all of it in itself."""
    kept: dict[str, Any] = {name: {} for name in _KEPT}
    return type("_World", (distributed_c10d._World,), kept | {"group_count": 0})()


class _Worlds:
    """Stands for torch's record of its groups, and is that of the rank that asks."""

    def __init__(self, usual: Any) -> None:
        vars(self)["usual"] = usual

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own(), name, value)

    def _own(self) -> Any:
        world = current_world()
        if world is None:
            return vars(self)["usual"]
        name = f"torch {current_rank()}"
        return world.shared[name] if name in world.shared else world.shared.setdefault(name, _record())


def _refusing(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let no simulated rank make groups of other backends: these talk with real processes, and wait where no world sees it."""

    @wraps(make)
    def make_group(size: int, rank: int, ranks: Any, backend: Any, *arguments: Any, **named: Any) -> Any:
        names = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
        if current_runtime().is_simulated and names != {NAME}:
            raise UnsupportedError(
                f"a simulated world has torch's groups of oneaccord alone, and one of {str(backend)!r} was asked for: name {NAME!r} in "
                "init_process_group() and new_group(), or run the program on processes"
            )
        return make(size, rank, ranks, backend, *arguments, **named)

    return make_group


def _telling_ranks_apart(make: Callable[..., None]) -> Callable[..., None]:
    """Let no rank find in torch's caches what another one has kept there for a mesh: they compare what torch takes for a thread's number."""

    @wraps(make)
    def make_mesh(mesh: Any, *arguments: Any, **named: Any) -> None:
        make(mesh, *arguments, **named)
        rank = current_rank()
        if rank is not None:
            mesh._thread_id = rank

    return make_mesh


def within_world(meet: Callable[..., Iterator[tuple[Any, int, int]]]) -> Callable[..., Iterator[tuple[Any, int, int]]]:
    """Return how ranks meet: those that are threads where they are, whatever ``init_method`` says, and all others as given."""

    @wraps(meet)
    def meet_here(url: str, *arguments: Any, **named: Any) -> Iterator[tuple[Any, int, int]]:
        world, rank, store = current_world(), current_rank(), be_rank()
        if world is None or rank is None:
            yield from meet(url, *arguments, **named)
        else:
            yield store, rank, world.world_size

    return meet_here


class Store(StoreBase):
    """torch's store, for ranks that are threads, whose waits pass through their world.

    Parameters
    ----------
    runtime
        What the ranks run on.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._kept: Any = torch.distributed.HashStore()
        self._runtime = runtime
        self._lock = threading.Lock()
        self._waiting: list[Place] = []

    def set(self, key: str, value: Any) -> None:
        """Keep a value."""
        self._change(self._kept.set, key, value)

    def get(self, key: str) -> Any:
        """Return a value; wait until it is there."""
        self.wait([key], self._kept.timeout)
        return self._kept.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return it."""
        return int(self._change(self._kept.add, key, amount))

    def compare_set(self, key: str, expected: Any, value: Any) -> Any:
        """Keep a value where the one that is there is as expected; return the one that is there then."""
        return self._change(self._kept.compare_set, key, expected, value)

    def delete_key(self, key: str) -> bool:
        """Forget a value; return whether there was one."""
        return bool(self._kept.delete_key(key))

    def num_keys(self) -> int:
        """Return how many values are kept."""
        return int(self._kept.num_keys())

    def check(self, keys: list[str]) -> bool:
        """Return whether all of some values are there."""
        return bool(self._kept.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of some values are there, for at most some seconds of the world's clock."""
        seconds = (timeout or self._kept.timeout).total_seconds()
        until = self._runtime.now() + seconds
        while True:
            with self._lock:
                if self.check(keys):
                    return
                place = self._runtime.place(for_good=False)
                self._waiting.append(place)
            if not place.wait(until - self._runtime.now()) and not self.check(keys):
                missing = ", ".join(key for key in keys if not self.check([key]))
                raise torch.distributed.DistStoreError(f"no rank has set {missing} in torch's store within {seconds:g} s")

    def _change(self, change: Callable[..., Any], *arguments: Any) -> Any:
        result = change(*arguments)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for place in waiting:
            place.wake()
        return result


# What torch waits for in C++, where no world sees it


def _waiting(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let other simulated ranks run while one waits for a future."""

    @wraps(wait)
    def wait_for(future: Any) -> Any:
        runtime = current_runtime()
        while runtime.is_simulated and not future.done():
            runtime.glance()
        return wait(future)

    return wait_for


_hurry: ContextVar[bool] = ContextVar("oneaccord_torch_hurry", default=False)


def _hurrying(reduce: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let what C++ waits for in the same breath have ended when the call for it returns."""

    @wraps(reduce)
    def reduce_at_once(reducer: Any) -> None:
        token = _hurry.set(True)
        try:
            reduce(reducer)
        finally:
            _hurry.reset(token)

    return reduce_at_once


class Completion:
    """Does in a simulated world what is to follow a call, and lets C++ that waits for it in a backward pass find it done.

    Parameters
    ----------
    runtime
        What the rank runs on.
    work
        The call.
    action
        What is to follow.
    """

    def __init__(self, runtime: Runtime, work: Work[Any], action: Callable[[], None]) -> None:
        self._runtime = runtime
        self._action = action
        self._ended = False
        self._place: Any = None
        if not _hurry.get():
            with suppress(RuntimeError):  # no backward pass runs in this thread
                torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        # In a thread of its own: what is to follow may wait for later calls.
        work.add_done_callback(lambda _: runtime.start(self._do))
        if _hurry.get():
            self._wait()

    def _do(self) -> None:
        try:
            self._action()
        finally:
            self._ended = True
            if self._place is not None:
                self._place.wake()

    def _wait(self) -> None:
        if not self._ended:
            self._place = self._runtime.place(for_good=True)
            self._place.wait(None)
