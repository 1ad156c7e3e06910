"""References to objects of other ranks: who has them, and until when."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from support.worlds import must, thread_world

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord.api import Group
from oneaccord_simulated import Kill
from oneaccord_simulated.running import Simulation

_SOON_S = 30.0


class Counter:
    """An object that cannot travel."""

    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, by: int, times: int = 1) -> int:
        self.value += by * times
        return self.value

    def _secret(self) -> None: ...


class World:
    """The functions of every rank, and what has become of the objects that they made."""

    def __init__(self) -> None:
        self.gone = [threading.Event() for _ in range(3)]
        self.kept: dict[int, Any] = {}

    def functions(self, group: Group) -> dict[str, Callable[..., Any]]:
        def make(start: int) -> Counter:
            counter = Counter(start)
            weakref.finalize(counter, self.gone[group.rank].set)
            return counter

        def value(counter: Counter) -> int:
            return counter.value

        def keep(ref: Any) -> None:
            self.kept[group.rank] = ref

        def drop() -> None:
            del self.kept[group.rank]

        def use(by: int) -> Any:
            return self.kept[group.rank].call("add", by, type=int).wait()

        def give_back() -> Any:
            return self.kept[group.rank]

        def settings() -> dict[str, int]:
            return {"a": 1}

        each = [make, value, keep, drop, use, give_back, settings]
        return {function.__name__: function for function in each}

    def run(self, program: Callable[[mp.Service], Any], world_size: int = 2) -> list[Any]:
        def body(group: Group) -> Any:
            with mp.Service(group, self.functions(group)) as svc:
                return program(svc) if group.rank == 0 else None

        return must(thread_world(body, world_size, "shm"))


def test_methods_arguments_and_copies() -> None:
    def program(svc: mp.Service) -> None:
        ref = svc.remote(1, "make", 5)
        assert ref.owner == 1
        assert ref.call("add", 2, times=3).wait() == 11
        assert svc.call(1, "value", ref).wait() == 11
        assert svc.call(1, "value", counter=ref).wait() == 11
        with pytest.raises(oa.UsageError, match="cannot travel"):
            ref.get()
        with pytest.raises(oa.UsageError, match="the Counter on rank 1 has no method 'sub'"):
            ref.call("sub").wait()
        with pytest.raises(oa.UsageError, match="underscore"):
            ref.call("_secret")
        with pytest.raises(oa.UsageError, match=r"a method's name .* not 5"):
            ref.call(5)  # type: ignore[call-overload]
        with pytest.raises(oa.UsageError, match="the argument 'by' of 'add' does not fit"):
            ref.call("add", "x").wait()
        with pytest.raises(oa.UsageError, match="missing a required argument: 'start'"):
            svc.remote(1, "make")
        assert svc.remote(1, "settings").get(type=dict[str, int]) == {"a": 1}
        own = svc.remote(0, "make", 1)
        assert own.get().add(1) == 2
        with pytest.raises(oa.UsageError, match="cannot travel"):
            svc.call(1, "value", [ref])

    World().run(program)


def test_the_last_reference_releases_the_object() -> None:
    world = World()

    def program(svc: mp.Service) -> None:
        for owner in (0, 1):
            ref = svc.remote(owner, "make", 5)
            assert not world.gone[owner].is_set()
            del ref
            assert world.gone[owner].wait(_SOON_S)

    world.run(program)


def test_a_reference_that_was_passed_on_counts() -> None:
    world = World()

    def program(svc: mp.Service) -> None:
        ref = svc.remote(1, "make", 5)
        svc.call(2, "keep", ref).wait()
        del ref
        assert svc.call(2, "use", 3).wait() == 8  # rank 2 asks rank 1
        back = svc.call(2, "give_back").wait()
        svc.call(2, "drop").wait()
        assert back.owner == 1
        assert back.call("add", 1).wait() == 9
        assert not world.gone[1].is_set()
        del back
        assert world.gone[1].wait(_SOON_S)

    world.run(program, 3)


def test_the_owner_gets_its_own_reference_back() -> None:
    world = World()

    def program(svc: mp.Service) -> None:
        ref = svc.remote(0, "make", 5)
        svc.call(1, "keep", ref).wait()
        del ref
        back = svc.call(1, "give_back").wait()
        svc.call(1, "drop").wait()
        assert back.owner == 0
        assert back.get().value == 5
        del back
        assert world.gone[0].wait(_SOON_S)
        assert svc.objects == 0

    world.run(program)


def test_close_lets_go_of_what_is_still_referred_to() -> None:
    world = World()
    refs = []

    def program(svc: mp.Service) -> None:
        refs.append(svc.remote(1, "make", 5))

    world.run(program)
    assert world.gone[1].wait(_SOON_S)
    with pytest.raises(oa.ClosedError, match="its references with it"):
        refs[0].get()


def test_a_failure_lets_go_of_what_others_referred_to() -> None:
    world = World()
    left = {}

    def body(group: Group) -> Any:
        svc = mp.Service(group, world.functions(group))
        own, other = (svc.remote(rank, "make", 5) for rank in (group.rank, (group.rank + 1) % 3))
        try:
            oa.sleep(10)
            other.call("add", 1).wait()
        except oa.PeerLostError:
            left[group.rank] = svc.objects
            with pytest.raises(oa.PeerLostError):
                own.get()
        return own, other

    Simulation(3, faults=[Kill(rank=1, at_s=5)]).execute(lambda _: body(oa.init()))
    assert left == {0: 0, 2: 0}
    assert world.gone[0].wait(_SOON_S)
    assert world.gone[2].wait(_SOON_S)


def test_a_service_that_is_left_by_an_exception_lets_go_of_its_objects() -> None:
    world = World()

    def leave(group: Group) -> None:
        with mp.Service(group, world.functions(group)) as svc:
            svc.kept = svc.remote(0, "make", 5)  # type: ignore[attr-defined]
            raise LookupError

    with oa.init(rank=0, world_size=1) as group, pytest.raises(LookupError):
        leave(group)
    assert world.gone[0].wait(_SOON_S)
