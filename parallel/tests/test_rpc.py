"""Functions that other ranks call: results, errors, limits, order, and the end of a service."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import must, thread_world

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord.api import Group
from oneaccord_parallel.rpc.exchange import Exchange
from oneaccord_simulated import Kill, Pause
from oneaccord_simulated.running import Simulation

_SOON_S = 30.0
"""More than anything here takes, so that only a hang ends by it."""


def serve(program: Callable[[mp.Service], Any], world_size: int = 2, backend: str = "shm", /, **options: Any) -> list[Any]:
    """Run ``program`` on rank 0, while the others serve; every rank has the functions below."""

    def body(group: Group) -> Any:
        with mp.Service(group, FUNCTIONS, **options) as svc:
            return program(svc) if group.rank == 0 else None

    return must(thread_world(body, world_size, backend))


@dataclass
class Point:
    x: int
    y: float


def add(a: Any, b: Any = 10) -> Any:
    return a + b


def moved(point: Point, by: int) -> Point:
    return Point(point.x + by, point.y)


def fail(text: str) -> None:
    raise LookupError(text)


def ping(svc: mp.Service, rank: int, times: int) -> int:
    return 0 if times == 0 else 1 + svc.call(rank, "ping", svc.rank, times - 1, type=int).wait()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": add,
    "moved": moved,
    "fail": fail,
    "ping": ping,
    "zeros": np.zeros,
    "an_object": object,
}


@pytest.mark.parametrize("rank", [0, 1], ids=["itself", "another rank"])
def test_results_have_their_types(rank: int) -> None:
    def program(svc: mp.Service) -> None:
        assert svc.call(rank, "add", 1, b=2).wait() == 3
        assert svc.call(rank, "add", {"no": 1}["no"]).wait() == 11
        assert svc.call(rank, "moved", Point(1, 0.5), 2, type=Point).wait() == Point(3, 0.5)
        total = svc.call(rank, "add", np.arange(6, dtype=np.float32).reshape(2, 3), 1, type=np.ndarray).wait()
        assert total.dtype == np.float32
        np.testing.assert_array_equal(total, [[1, 2, 3], [4, 5, 6]])
        assert svc.call(rank, "zeros", 100_000, type=np.ndarray).wait().shape == (100_000,)

    serve(program)


_leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()


def test_what_can_travel_comes_back_as_it_was() -> None:
    values: list[Any] = []

    @settings(max_examples=50)
    @given(st.recursive(_leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
    def collect(value: Any) -> None:
        values.append(value)

    collect()
    with oa.init(rank=0, world_size=1) as group, mp.Service(group, {"same": lambda *x: x}) as svc:
        assert svc.call(0, "same", *values).wait() == values


@pytest.mark.parametrize("dtype", ["bool", "int8", ">i4", "complex128", "bfloat16"])
def test_arrays_keep_their_dtype(dtype: str) -> None:
    array = np.zeros((2, 0, 3), dtype) if dtype != "bfloat16" else np.ones(3, pytest.importorskip("ml_dtypes").bfloat16)
    with oa.init(rank=0, world_size=1) as group, mp.Service(group, {"same": lambda x: x}) as svc:
        came = svc.call(0, "same", array).wait()
    assert (came.dtype, came.shape) == (array.dtype, array.shape)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("rank", [0, 1], ids=["itself", "another rank"])
def test_large_arrays_may_be_changed_at_once(rank: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    send_async = Group.send_async

    def send_and_yield(*args: Any, **options: Any) -> Any:
        work = send_async(*args, **options)
        time.sleep(0)  # so that threads come between each other's messages
        return work

    monkeypatch.setattr(Group, "send_async", send_and_yield)

    def program(svc: mp.Service) -> None:
        def caller(number: int) -> None:
            x = np.arange(80_000).reshape(2, -1)
            replies = []
            for i in range(12):
                x += 1
                replies.append(svc.call(rank, "add", [x, number, x[:, ::2].astype(">f8")], ["small", x[:, :3]]))
                small = svc.call(rank, "add", number, i)
            x[...] = 0
            for i, reply in enumerate(replies, 1):
                first, told, third, _, little = reply.wait()
                assert told == number
                assert third.dtype == ">f8"
                np.testing.assert_array_equal(first, np.arange(80_000).reshape(2, -1) + i)
                np.testing.assert_array_equal(third, first[:, ::2])
                np.testing.assert_array_equal(little, first[:, :3])
                first += 1  # it belongs to who got it
            assert small.wait() == number + 11
            found.append(number)

        found: list[int] = []
        threads = [threading.Thread(target=caller, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [0, 1, 2]

    serve(program, 2, backend)


def test_wrong_calls_are_refused_and_the_service_goes_on() -> None:
    def program(svc: mp.Service) -> None:
        with pytest.raises(oa.UsageError, match="rank 1 has no function 'sub'; it has 'add', 'an_object', 'fail'"):
            svc.call(1, "sub")
        with pytest.raises(oa.UsageError, match=r"rank 1 has no function \['add'\]; it has"):
            svc.call(1, ["add"])  # type: ignore[call-overload]
        with pytest.raises(oa.InvalidRankError, match=r"from 0 to 1, not 2"):
            svc.call(2, "add")
        with pytest.raises(oa.UsageError, match=r"'add' takes \(a: .*b: .*=.*10\).*unexpected keyword argument 'c'"):
            svc.call(1, "add", 1, c=2).wait()
        with pytest.raises(oa.UsageError, match="the argument 'point' of 'moved' does not fit"):
            svc.call(1, "moved", [1], 2).wait()
        with pytest.raises(oa.UsageError, match=r"the result of 'add' on rank 1 does not fit .*`str`"):
            svc.call(1, "add", 1, 2, type=str).wait()
        with pytest.raises(
            oa.UsageError, match=r"an argument of the call of 'add' on rank 1 cannot travel: it holds an object of type object"
        ):
            svc.call(1, "add", object())
        with pytest.raises(oa.UsageError, match="the result of 'an_object' on rank 1 cannot travel"):
            svc.call(1, "an_object").wait()
        assert svc.call(1, "add", 1).wait() == 11

    serve(program)


def test_an_exception_comes_with_its_traceback() -> None:
    def program(svc: mp.Service) -> None:
        with pytest.raises(mp.RemoteError, match="'fail' on rank 1 raised LookupError: no such key") as caught:
            svc.call(1, "fail", "no such key \N{SNOWMAN}").wait()
        error = caught.value
        assert (error.rank, error.function, error.kind) == (1, "fail", "LookupError")
        assert "raise LookupError(text)" in error.traceback
        assert error.traceback.count("File ") == 1  # nothing of the service

    serve(program)


class Wordless(Exception):
    """An exception whose words are another one."""

    def __str__(self) -> str:
        raise GeneratorExit


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration, Wordless]
)
def test_whatever_a_function_raises_comes_to_its_caller_and_the_service_goes_on(kind: type[BaseException]) -> None:
    def raises() -> None:
        raise kind

    with oa.init(rank=0, world_size=1) as group, mp.Service(group, {"raises": raises, "add": add}, timeout_s=_SOON_S) as svc:
        with pytest.raises(mp.RemoteError, match=f"'raises' on rank 0 raised {kind.__name__}: "):
            svc.call(0, "raises").wait()
        assert svc.call(0, "add", 1).wait() == 11


def test_an_array_that_cannot_be_is_refused() -> None:
    about = msgspec.msgpack.encode(["<f4", [2**62, 2**62]])
    forged = msgspec.msgpack.Ext(77, len(about).to_bytes(2, "little") + about)

    def program(svc: mp.Service) -> None:
        with pytest.raises(oa.UsageError, match="the result of 'forged' on rank 0 does not fit its type"):
            svc.call(0, "forged").wait()

    with oa.init(rank=0, world_size=1) as group, mp.Service(group, {"forged": lambda: forged}) as svc:
        program(svc)


@pytest.mark.parametrize("timeout_s", ["1", 0, float("nan"), True])
def test_a_timeout_is_a_number_of_seconds(timeout_s: Any) -> None:
    with oa.init(rank=0, world_size=1) as group, mp.Service(group, FUNCTIONS) as svc:
        for waits in (lambda: svc.call(0, "add", 1).wait(timeout_s), lambda: svc.close(timeout_s=timeout_s)):
            with pytest.raises(oa.UsageError, match="timeout_s must be a positive, finite number of seconds"):
                waits()


def test_nothing_larger_than_max_bytes_travels() -> None:
    def program(svc: mp.Service) -> None:
        before = svc.objects
        with pytest.raises(oa.SizeMismatchError, match=r"the call of 'add' on rank 1 has .* bytes, and at most 1000"):
            svc.call(1, "add", bytes(1000))
        with pytest.raises(oa.SizeMismatchError, match=r"the result of 'zeros' on rank 1 has .* bytes"):
            svc.call(1, "zeros", 125).wait()
        with pytest.raises(oa.SizeMismatchError, match=r"the call of 'add' on rank 1 has 8000\d\d bytes"):
            svc.call(1, "add", np.zeros(100_000))
        assert svc.call(1, "zeros", 100, type=np.ndarray).wait().nbytes == 800
        assert svc.objects == before

    serve(program, max_bytes=1000)


def test_the_ranks_agree_on_max_bytes() -> None:
    def body(group: Group) -> str:
        with pytest.raises(oa.UsageError) as caught:
            mp.Service(group, {}, max_bytes=100 + group.rank)
        assert group.all_reduce(1) == 2
        return str(caught.value)

    assert must(thread_world(body, 2, "tcp")) == ["all ranks must give the same max_bytes, but they gave [100, 101]"] * 2


@pytest.mark.parametrize("name", ["", ".get", "\ud800"])
def test_what_is_wrong_on_one_rank_is_told_on_all(name: str) -> None:
    def body(group: Group) -> str:
        functions: Any = {name: add} if group.rank == 1 else FUNCTIONS
        with pytest.raises(oa.UsageError) as caught:
            mp.Service(group, functions)
        return str(caught.value)

    assert (
        must(thread_world(body, 2, "tcp"))
        == [f"rank 1: a function's name must be a text that does not begin with a dot, not {name!r}"] * 2
    )


def test_a_service_needs_a_group() -> None:
    with pytest.raises(oa.UsageError, match="expected a Group"):
        mp.Service(None, {})  # type: ignore[arg-type]


def test_a_late_reply_is_an_error_of_its_caller_alone() -> None:
    may_end = threading.Event()

    def body(group: Group) -> None:
        with mp.Service(group, {"wait": lambda: may_end.wait(_SOON_S), "add": add}) as svc:
            if group.rank == 0:
                late = svc.call(1, "wait", timeout_s=0.02)
                other = svc.call(1, "wait")
                with pytest.raises(oa.DeadlineError, match=r"the call of 'wait' on rank 1 had no reply within 0.02 s"):
                    late.wait()
                with pytest.raises(oa.DeadlineError, match="the call continues"):
                    other.wait(timeout_s=0.01)
                assert svc.call(1, "add", 1).wait() == 11
                may_end.set()
                assert other.wait() is True
                with pytest.raises(oa.DeadlineError):  # it stays so, although the reply has come meanwhile
                    late.wait()

    must(thread_world(body, 2, "tcp"))


def test_a_large_call_of_a_rank_that_is_stopped_is_late_and_no_more() -> None:
    late = []

    def body(group: Group) -> None:
        with mp.Service(group, {"length": len}) as svc:
            if group.rank == 0:
                oa.sleep(2)
                reply = svc.call(1, "length", bytes(1 << 20), timeout_s=0.02)  # it does not wait for rank 1 to take it
                with pytest.raises(oa.DeadlineError) as caught:
                    reply.wait()
                late.append(caught.value.peer)
                raise KeyError

    done = Simulation(2, faults=[Pause(rank=1, at_s=1)]).execute(lambda _: body(oa.init()))
    assert isinstance(done.errors[0], KeyError)
    assert late == [1]


def test_a_caller_that_is_stopped_keeps_no_other_from_being_served() -> None:
    served = []

    def body(group: Group) -> None:
        with mp.Service(group, FUNCTIONS, threads=1) as svc:
            if group.rank == 2:
                for _ in range(3):
                    svc.call(1, "zeros", 1 << 17)
                oa.sleep(10)
            if group.rank == 0:
                oa.sleep(5)
                served.append(svc.call(1, "add", 1, timeout_s=_SOON_S).wait())
                raise KeyError

    Simulation(3, faults=[Pause(rank=2, operation="sleep")]).execute(lambda _: body(oa.init()))
    assert served == [11]


def test_calls_are_answered_out_of_order() -> None:
    second_came = threading.Event()

    def body(group: Group) -> None:
        with mp.Service(group, {"first": lambda: second_came.wait(_SOON_S), "second": second_came.set}) as svc:
            if group.rank == 0:
                first = svc.call(1, "first")
                svc.call(1, "second").wait()
                assert first.wait() is True

    must(thread_world(body, 2, "shm"))


def test_many_threads_call_at_once() -> None:
    def program(svc: mp.Service) -> None:
        found: dict[int, list[int]] = {}

        def caller(number: int) -> None:
            found[number] = [svc.call(1 + number % 2, "add", number, i).wait() for i in range(20)]

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: [number + i for i in range(20)] for number in range(8)}

    serve(program, 3)


@pytest.mark.parametrize("threads", [2, 3])
def test_no_more_functions_run_than_there_are_threads(threads: int) -> None:
    with oa.init(rank=0, world_size=1) as group:
        running, may_end = threading.Semaphore(0), threading.Event()

        def work() -> None:
            running.release()
            assert may_end.wait(_SOON_S)

        with mp.Service(group, {"work": work}, threads=threads) as svc:
            replies = [svc.call(0, "work") for _ in range(4)]
            for _ in range(threads):
                assert running.acquire(timeout=_SOON_S)
            exchange = svc._exchange  # the counters of the service say what no waiting could show
            with exchange.lock:
                assert (len(exchange._workers), len(exchange._jobs)) == (threads, 4 - threads)
            may_end.set()
            for reply in replies:
                reply.wait()


def test_a_call_that_comes_as_the_only_worker_goes_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneaccord_parallel.rpc.exchange._IDLE_S", 0.001)
    group = SimpleNamespace(rank=0, world_size=1)
    exchange = Exchange(group, 1, take=lambda *_: None, fail=lambda _: None)  # type: ignore[arg-type]
    lock, releases, done = exchange.lock, [], threading.Event()

    class Watched:
        """Stands for the lock: a job comes as soon as the worker, which was idle for long enough, has let go of it."""

        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            releases.append(threading.current_thread())
            if len(releases) == 4:  # of this thread, then of the worker: took the job, became idle, was so for long enough
                with lock:
                    exchange.submit(done.set)

    exchange.lock = Watched()  # type: ignore[assignment]
    with exchange.lock:
        exchange.submit(lambda: None)
    assert done.wait(_SOON_S)
    exchange.close()


def test_functions_call_back() -> None:
    serve(lambda svc: [svc.call(1, "ping", 0, 9).wait(), svc.call(1, "ping", 2, 4).wait()], 3)


def test_close_waits_for_calls_that_nobody_waits_for() -> None:
    done: list[int] = []

    def pass_on(svc: mp.Service, left: int) -> None:
        if left:
            svc.call((svc.rank + 1) % 3, "pass_on", left - 1)
        done.append(svc.rank)

    def body(group: Group) -> int:
        with mp.Service(group, {"pass_on": pass_on}) as svc:
            if group.rank == 0:
                svc.call(1, "pass_on", 20)
        return len(done)

    assert must(thread_world(body, 3, "tcp")) == [21] * 3


def test_callbacks_and_coroutines() -> None:
    def program(svc: mp.Service) -> None:
        called, came = [], threading.Event()

        def note(reply: mp.Reply[Any]) -> None:
            called.append(reply.wait() + svc.call(1, "add", 1).wait())  # a callback may call again
            came.set()

        reply = svc.call(1, "add", 1)
        reply.add_done_callback(note)
        assert came.wait(_SOON_S)
        assert called == [22]
        assert reply.done()
        assert reply.exception() is None

        async def both() -> list[Any]:
            return await asyncio.gather(svc.call(1, "add", 1), svc.call(0, "add", 2))

        assert asyncio.run(both()) == [11, 12]

    serve(program)


def test_a_function_cannot_close_its_service() -> None:
    def closes(svc: mp.Service) -> None:
        svc.close()

    def body(group: Group) -> None:
        with mp.Service(group, {"closes": closes}, timeout_s=_SOON_S) as svc:
            if group.rank == 0:
                with pytest.raises(mp.RemoteError, match="UsageError: a function of a service, or a callback, cannot close it"):
                    svc.call(1, "closes").wait()

    must(thread_world(body, 2, "shm"))


def test_a_closed_service_says_so() -> None:
    def body(group: Group) -> None:
        with mp.Service(group, FUNCTIONS) as svc:
            pass
        svc.close()
        with pytest.raises(oa.ClosedError, match="the service was closed"):
            svc.call(0, "add", 1)

    must(thread_world(body, 2, "tcp"))


def test_a_service_does_not_disturb_the_calls_of_the_program() -> None:
    def body(group: Group) -> list[float]:
        with mp.Service(group, FUNCTIONS) as svc:
            replies = [svc.call(1 - group.rank, "add", i) for i in range(5)]
            total = group.all_reduce(1.0)
            came = group.sendrecv(group.rank, 1 - group.rank, 1 - group.rank)
            return [float(total), float(came), *(reply.wait() for reply in replies)]

    assert must(thread_world(body, 2, "shm")) == [[2.0, 1 - rank, 10, 11, 12, 13, 14] for rank in range(2)]


def test_a_service_may_be_idle_for_longer_than_a_call_may_last() -> None:
    def body(group: Group) -> Any:
        with mp.Service(group, FUNCTIONS) as svc:
            if group.rank == 1:
                return None
            oa.sleep(3600)  # the config's timeout_s is 20 s here, and rank 1 waits in close()
            return svc.call(1, "add", 1).wait()

    assert must(thread_world(body, 2, "simulated")) == [11, None]


def test_a_dead_rank_is_named_on_every_call() -> None:
    found: dict[int, str] = {}

    def hang(svc: mp.Service) -> None:
        oa.sleep(100)

    def body(group: Group) -> None:
        with mp.Service(group, {"hang": hang}) as svc:
            if group.rank == 0:
                replies = [svc.call(1, "hang"), svc.call(2, "hang")]
                for number, reply in enumerate(replies):
                    try:
                        reply.wait()
                    except oa.PeerLostError as error:
                        found[number] = str(error)
            svc.close()

    done = Simulation(3, faults=[Kill(rank=1, at_s=5)]).execute(lambda _: body(oa.init()))
    assert found.keys() == {0, 1}
    assert all("rank 1 was lost" in text for text in found.values())
    assert isinstance(done.errors[2], oa.PeerLostError)


@pytest.mark.long
def test_a_call_of_a_rank_that_stands_still_ends_in_time() -> None:
    def body(group: Group) -> None:
        with mp.Service(group, {"add": add}) as svc:
            if group.rank == 0:
                oa.sleep(1)
                late = svc.call(1, "add", np.ones(100_000), timeout_s=0.1)
                again = svc.call(1, "add", np.ones(100_000), timeout_s=1000)
                with pytest.raises(oa.DeadlineError, match=r"no reply within 0.1 s"):
                    late.wait()
                np.testing.assert_array_equal(again.wait(), np.full(100_000, 11.0))

    done = Simulation(2, faults=[Pause(rank=1, at_s=0.5, for_s=100)]).execute(lambda _: body(oa.init()))
    assert done.errors == {}


def test_an_exception_in_the_block_ends_the_job() -> None:
    def body(group: Group) -> None:
        with mp.Service(group, FUNCTIONS):
            if group.rank == 0:
                raise KeyError("here")

    outcomes = thread_world(body, 2, "tcp")
    assert isinstance(outcomes[0], KeyError)
    assert isinstance(outcomes[1], oa.AbortedError)
