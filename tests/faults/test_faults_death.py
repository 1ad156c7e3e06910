"""Ranks that die, stop, raise or leave: every survivor learns which one, and at once."""

from __future__ import annotations

import pickle
import signal
import statistics
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.fault_tools import LONG_BEFORE_S, TELLING_JOINS, Nursery, Ranks
from support.waiting import until
from support.worlds import over_sockets

import oneaccord as oa
from oneaccord.api import Group

PROMISE_S = 1.0
"""Within what time a dead rank is named on every survivor, on a machine that has the time for it."""


def assert_lost(ranks: Ranks, victim: int, killed_at: float) -> float:
    """Check what every survivor was told; return how long after the death the last one was."""
    failures = ranks.raised()
    assert sorted(failures) == [rank for rank in range(ranks.world_size) if rank != victim], ranks.facts
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("PeerLostError", victim), failure
        assert f"rank {victim} was lost" in failure["text"]
    took = max(failure["ended"] for failure in failures.values()) - killed_at
    assert took < LONG_BEFORE_S
    return float(took)


CALLING = """
    with oa.init(timeout_s=30) as group:
        x = np.zeros(1 << 20, np.float32)
        group.all_reduce(x, out=x)
        tell("running")
        def forever():
            while True:
                group.all_reduce(x, out=x)
        attempt(forever)
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_kill_in_a_large_all_reduce(nursery: Nursery, victim: int) -> None:
    with nursery.ranks(CALLING) as ranks:
        ranks.start().await_facts("running")
        assert_lost(ranks, victim, ranks.signal(victim, signal.SIGKILL))


@pytest.mark.long
def test_a_dead_rank_is_named_within_a_second(nursery: Nursery) -> None:
    took = []
    for number in range(15):
        with nursery.ranks(CALLING) as ranks:
            ranks.start().await_facts("running")
            took.append(assert_lost(ranks, number % 3, ranks.signal(number % 3, signal.SIGKILL)))
    assert statistics.median(took) < PROMISE_S, took


# What the survivors do, each another thing, or all the same.
WAITING = {
    "each in a call of its own": """
        waits = {
            WAITING[0]: lambda: group.recv(VICTIM),
            WAITING[1]: lambda: group.recv(WAITING[0]),
            WAITING[2]: lambda: group.send(np.zeros(8 << 20), VICTIM),
            WAITING[3]: group.barrier,
            WAITING[4]: lambda: until_failed(group) or group.barrier(),
        }
        attempt(waits[rank])
    """,
    "closing": "attempt(group.close)",
}


@pytest.mark.parametrize("victim", [0, 5])
@pytest.mark.parametrize("waiting", WAITING)
def test_kill_while_others_wait(nursery: Nursery, waiting: str, victim: int) -> None:
    program = f"""
VICTIM = {victim}
WAITING = [rank for rank in range(world_size) if rank != VICTIM]
group = oa.init(timeout_s=30)
group.barrier()
tell("running")
if rank == VICTIM:
    time.sleep(60)
{textwrap.dedent(WAITING[waiting])}
"""
    with nursery.ranks(program, 6) as ranks:
        ranks.start().await_facts("running")
        assert_lost(ranks, victim, ranks.signal(victim, signal.SIGKILL))


def test_rank_0_may_die_while_it_tells_the_others_that_all_have_left(nursery: Nursery) -> None:
    program = """
        from oneaccord.control.protocol import Farewell
        from oneaccord.control.store import Store

        if rank == 0:
            send = Store._send

            def send_to_rank_1_alone(store, to, message):
                if not isinstance(message, Farewell):
                    send(store, to, message)
                elif to == 1:
                    send(store, to, message)
                    store._loop.call_later(0.0, lambda: os.kill(os.getpid(), 9))

            Store._send = send_to_rank_1_alone
        group = oa.init(timeout_s=30)
        group.barrier()
        attempt(group.close)
        tell("closed")
    """
    with nursery.ranks(program, 4) as ranks:
        ranks.start().wait()
        assert not ranks.raised(), ranks.raised()
        assert sorted(fact["rank"] for fact in ranks.facts if fact["what"] == "closed") == [1, 2, 3]


JOINING = TELLING_JOINS + "attempt(oa.init, timeout_s=30)"


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_while_the_ranks_meet(nursery: Nursery, victim: int) -> None:
    with nursery.ranks(JOINING) as ranks:
        ranks.start(0, 1).await_facts("joined", 2)
        killed_at = ranks.signal(victim, signal.SIGKILL)
        failure = ranks.raised()[1 - victim]
    assert (failure["type"], failure["about"]) == ("PeerLostError", victim)
    assert victim == 0 or "while the ranks were meeting" in failure["text"]
    assert failure["ended"] - killed_at < LONG_BEFORE_S


def test_a_stopped_rank_is_named_when_the_time_is_up_and_learns_it_when_it_goes_on(nursery: Nursery) -> None:
    program = """
        group = oa.init(timeout_s=30)
        group.barrier()
        tell("ready")
        until_told_to_go()  # so that those who go on come to their calls at about the same time
        attempt(group.barrier, timeout_s=1)
    """
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("ready")
        ranks.signal(1, signal.SIGSTOP)
        ranks.go()
        failures = ranks.await_facts("raised", 2)
        assert [(fact["rank"], fact["type"], fact["about"]) for fact in failures] == [
            (0, "DeadlineError", 1),
            (2, "DeadlineError", 1),
        ]
        ranks.signal(1, signal.SIGCONT)
        assert len({fact["text"] for fact in ranks.raised().values()}) == 1


@pytest.mark.parametrize(
    "calls",
    [
        "group.barrier(timeout_s=0.5 * rank)",  # who gives up first breaks its connections to the others
        "while True: group.sendrecv(np.ones(10), dest=(rank + 1) % 4, source=rank - 1, timeout_s=1)",
        "group.split(0, timeout_s=1)",
        "group.recv(source=rank - 1, timeout_s=2 - 0.5 * rank)",
    ],
)
@pytest.mark.parametrize("backend", ["tcp", pytest.param("shm", marks=pytest.mark.long)])
def test_where_rank_0_stands_still_every_survivor_says_that_and_names_nobody_else(
    nursery: Nursery, calls: str, backend: str
) -> None:
    program = f"""
        group = oa.init(timeout_s=30)
        group.barrier()
        tell("ready")
        until_told_to_go()
        def go():
            {calls}
        attempt(go)
        attempt(group.barrier)
        os._exit(3)
    """
    with nursery.ranks(program, 4, ONEACCORD_BACKEND=backend) as ranks:
        ranks.start().await_facts("ready")
        ranks.signal(0, signal.SIGSTOP)
        ranks.go()
        ranks.wait([1, 2, 3])
        failures = [fact for fact in ranks.facts if fact["what"] == "raised"]
    assert sorted(fact["rank"] for fact in failures) == [1, 1, 2, 2, 3, 3]
    assert {(fact["type"], fact["about"]) for fact in failures} == {("DeadlineError", 0)}, failures
    assert len({fact["text"].splitlines()[0] for fact in failures}) == 1
    assert "rank 0 did not answer" in failures[0]["text"]


def test_whom_a_late_rank_waits_for_is_not_named_where_it_waits_for_a_stopped_one(nursery: Nursery) -> None:
    program = """
        group = oa.init(timeout_s=30)
        group.barrier()
        tell("ready")
        until_told_to_go()
        attempt(group.recv, source=rank + 1, timeout_s=1 + rank)
        os._exit(3)
    """
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("ready")
        ranks.signal(3, signal.SIGSTOP)
        ranks.go()
        ranks.wait([0, 1, 2])
        failures = [fact for fact in ranks.facts if fact["what"] == "raised"]
    assert [(fact["type"], fact["about"]) for fact in failures] == [("DeadlineError", 3)] * 3, failures


def test_a_rank_that_ends_without_close_leaves_as_if_it_had(nursery: Nursery) -> None:
    program = """
        group = oa.init(timeout_s=30)
        group.barrier()
        tell("ended")
    """
    with nursery.ranks(program) as ranks:
        assert ranks.start().wait() == {0: 0, 1: 0, 2: 0}
        assert ranks.output() == ""


def test_a_rank_that_ends_early_without_close_is_found_by_those_that_wait(nursery: Nursery) -> None:
    program = """
        group = oa.init(timeout_s=30)
        group.barrier()
        if rank != 1:
            attempt(group.recv, 1)
    """
    with nursery.ranks(program) as ranks:
        failures = ranks.start().raised()
    assert {rank: (fact["type"], fact["about"]) for rank, fact in failures.items()} == dict.fromkeys(
        (0, 2), ("CollectiveMismatchError", 1)
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no such digit: 11\nmore of it"), "ValueError: no such digit: 11"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_what_leaves_the_block_of_a_group_on_one_rank_reaches_all(error: BaseException, words: str) -> None:
    def program(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            raise error
        group.recv(1)

    outcomes = over_sockets(program, 3)
    assert outcomes[1] is error
    for told in outcomes[::2]:
        assert (type(told), told.peer, str(told)) == (oa.AbortedError, 1, f"rank 1 ended with {words}")


ENDING = {
    "raise ValueError('no such digit: 11\\nmore of it')": (1, "AbortedError"),
    "sys.exit(3)": (
        3,
        "CollectiveMismatchError",
    ),  # the exit code cannot be known: the rank has left, and the others waited for it
}


@pytest.mark.parametrize("ending", ENDING)
def test_what_ends_one_process_outside_of_a_block_frees_the_others(nursery: Nursery, ending: str) -> None:
    program = f"""
        group = oa.init(timeout_s=30)
        group.barrier()
        tell("running")
        if rank == 1:
            until_told_to_go()
            {ending}
        attempt(group.recv, 1)
    """
    code, kind = ENDING[ending]
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("running")
        ranks.go()
        failures = ranks.raised()
        assert ranks.codes[1] == code
        assert kind != "AbortedError" or ranks.output(1).rstrip().endswith("ValueError: no such digit: 11\nmore of it")
    assert {rank: (fact["type"], fact["about"]) for rank, fact in failures.items()} == dict.fromkeys((0, 2), (kind, 1))
    assert kind != "AbortedError" or failures[0]["text"] == "rank 1 ended with ValueError: no such digit: 11"


def test_ctrl_c_in_one_rank_frees_the_others(nursery: Nursery) -> None:
    program = """
        with oa.init(timeout_s=30) as group:
            group.barrier()
            tell("running")
            # Another thread could send: without it these ranks, which wait for each other, would be told so on a slow machine.
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            if rank == 1:
                group.recv(0)
            attempt(group.recv, 1)
    """
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGINT)
        failures = ranks.raised()
        assert ranks.codes[1] == -signal.SIGINT
    assert sorted(failures) == [0, 2]
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("AbortedError", 1)
        assert "KeyboardInterrupt" in failure["text"]


def failing(calls: Callable[[Group], Any]) -> list[Any]:
    """Have rank 1 of 3 end with an error, and the others make calls; return what those returned."""
    come = threading.Barrier(3)

    def program(group: Group) -> Any:
        group.barrier()
        group.barrier()
        come.wait(30)  # else it may fail while others are still in the barrier
        if group.rank == 1:
            raise ValueError
        return calls(group)

    zeroth, _, second = over_sockets(program, 3)
    return [zeroth, second]


def until_failed(group: Group) -> None:
    """Wait until the group knows that its job has failed, without a call on it."""
    until(lambda: repr(group).endswith("failed>"))


def ends(calls: list[Callable[[], object]]) -> list[BaseException | None]:
    """Make calls; return what each of them raised."""
    told: list[BaseException | None] = []
    for call in calls:
        try:
            call()
            told.append(None)
        except oa.CommError as error:
            told.append(error)
    return told


def test_after_a_failure_each_later_call_raises_the_same_cause() -> None:
    def calls(group: Group) -> Any:
        x, other = np.zeros(3), 2 - group.rank
        told = ends(
            [
                group.barrier,
                lambda: group.all_reduce(x),
                lambda: group.send(x, other),
                lambda: group.recv(1),
                lambda: group.sendrecv(x, other, other),
                lambda: group.scatter(np.zeros(3)),
                lambda: group.all_to_all(x),
            ]
        )
        assert repr(group).endswith("failed>")
        # It has been told, so that `close` says nothing more.
        return told, ends([group.close, group.barrier])

    for told, after in failing(calls):
        assert {(type(error), error.peer) for error in told} == {(oa.AbortedError, 1)}
        assert len({str(error) for error in told}) == 1
        assert after[0] is None
        assert type(after[1]) is oa.ClosedError


def test_a_failure_that_no_call_has_told_is_told_by_close_once() -> None:
    def calls(group: Group) -> Any:
        until_failed(group)
        return ends([group.close, group.close])

    assert [[type(error) for error in told] for told in failing(calls)] == [[oa.AbortedError, type(None)]] * 2


CALLS: dict[str, tuple[Callable[[Group], Any], int | None]] = {
    "all_reduce": (lambda group: group.all_reduce(np.ones(3)), 2),
    "recv from rank 1": (lambda group: group.recv(source=1), 1),
    "split": (lambda group: group.split(0), None),
    "broadcast_object": (lambda group: group.broadcast_object({}, root=1), 2),
}


@pytest.mark.parametrize("is_known", [False, True], ids=["it fails meanwhile", "it had failed before"])
@pytest.mark.parametrize("operation", CALLS)
def test_who_loses_a_rank_is_told_which_call_that_ended(operation: str, is_known: bool) -> None:
    call, number = CALLS[operation]

    def calls(group: Group) -> Any:
        if is_known:
            until_failed(group)
        told = ends([lambda: call(group)] * 2)  # a later call is told of the same one
        return [*told, *pickle.loads(pickle.dumps(told))]

    for told in failing(calls):
        assert [(error.peer, error.operation, error.sequence) for error in told] == [(1, operation, number)] * 4


def test_who_loses_a_rank_is_told_that_a_work_ended() -> None:
    issued = threading.Barrier(3)

    def program(group: Group) -> Any:
        work = group.all_reduce_async(np.ones(3)) if group.rank != 1 else None
        issued.wait(30)
        if work is None:
            raise ValueError
        return ends([work.wait, group.barrier])

    for told in over_sockets(program, 3)[::2]:
        assert [(error.peer, error.operation, error.sequence) for error in told] == [(1, "all_reduce", 0)] * 2


def test_an_error_survives_pickling_with_all_that_it_knows() -> None:
    for rank, error in enumerate(over_sockets(lambda group: group.all_reduce(np.zeros(3 + group.rank)))):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) is oa.CollectiveMismatchError
        assert (str(copy), copy.rank, copy.peer, copy.operation, copy.sequence) == (
            str(error),
            rank,
            error.peer,
            "all_reduce",
            0,
        )
