"""Ranks that die, stop, raise or leave: every survivor learns which one, and at once."""

from __future__ import annotations

import signal

import pytest
from fault_tools import TELLING_JOINS, Nursery, Ranks

PROMISE_S = 1.0
"""Within what time a dead rank is named on every survivor."""
SOON_S = 5.0
"""Far below the timeouts: who is told within it was not told by a deadline."""


def assert_lost(ranks: Ranks, victim: int, killed_at: float) -> None:
    failures = ranks.raised()
    assert sorted(failures) == [rank for rank in range(ranks.world_size) if rank != victim], ranks.facts
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("PeerLostError", victim), failure
        assert f"rank {victim} was lost" in failure["text"]
        assert failure["ended"] - killed_at < PROMISE_S


@pytest.mark.parametrize("victim", range(3))
def test_kill_in_a_large_all_reduce(nursery: Nursery, victim: int) -> None:
    program = """
        with mh.init(timeout_s=20) as group:
            x = np.zeros(8 << 20, np.float32)
            group.all_reduce(x, out=x)
            tell("running")
            def forever():
                while True:
                    group.all_reduce(x, out=x)
            attempt(forever)
    """
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("running")
        assert_lost(ranks, victim, ranks.signal(victim, signal.SIGKILL))


WAITING = {
    "barrier": "attempt(group.barrier)",
    "recv": "attempt(group.recv, VICTIM)",
    "recv from a rank that lives": "attempt(group.recv, next(r for r in range(world_size) if r not in (rank, VICTIM)))",
    "send of what nobody takes": "attempt(group.send, np.zeros(8 << 20), VICTIM)",
    "close": "attempt(group.close)",
    "nothing": "until_failed(group); attempt(group.barrier)",
}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("waiting", WAITING)
def test_kill_while_others_wait(nursery: Nursery, waiting: str, victim: int) -> None:
    program = f"""
        VICTIM = {victim}
        group = mh.init(timeout_s=20)
        group.barrier()
        tell("running")
        if rank == VICTIM:
            time.sleep(30)
        {WAITING[waiting]}
    """
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("running")
        assert_lost(ranks, victim, ranks.signal(victim, signal.SIGKILL))


def test_rank_0_may_die_while_it_tells_the_others_that_all_have_left(nursery: Nursery) -> None:
    program = """
        from manyhands.control.protocol import Farewell
        from manyhands.control.store import Store

        if rank == 0:
            send = Store._send

            def send_to_rank_1_alone(store, to, message):
                if not isinstance(message, Farewell):
                    send(store, to, message)
                elif to == 1:
                    send(store, to, message)
                    store._loop.call_later(0.0, lambda: os.kill(os.getpid(), 9))

            Store._send = send_to_rank_1_alone
        group = mh.init(timeout_s=20)
        group.barrier()
        attempt(group.close)
        tell("closed")
    """
    with nursery.ranks(program, 4) as ranks:
        ranks.start().wait()
        assert not ranks.raised(), ranks.raised()
        assert sorted(fact["rank"] for fact in ranks.facts if fact["what"] == "closed") == [1, 2, 3]


JOINING = TELLING_JOINS + "attempt(mh.init, timeout_s=20)"


def test_kill_while_the_ranks_meet(nursery: Nursery) -> None:
    with nursery.ranks(JOINING) as ranks:
        ranks.start(0, 1).await_facts("joined", 2)
        killed_at = ranks.signal(1, signal.SIGKILL)
        failure = ranks.raised()[0]
    assert (failure["type"], failure["about"]) == ("PeerLostError", 1)
    assert "while the ranks were meeting" in failure["text"]
    assert failure["ended"] - killed_at < PROMISE_S


def test_kill_of_rank_0_while_the_ranks_meet(nursery: Nursery) -> None:
    with nursery.ranks(JOINING) as ranks:
        ranks.start(0, 1).await_facts("joined", 2)
        killed_at = ranks.signal(0, signal.SIGKILL)
        failure = ranks.raised()[1]
    assert (failure["type"], failure["about"]) == ("PeerLostError", 0)
    assert failure["ended"] - killed_at < PROMISE_S


@pytest.mark.parametrize("victim", range(3))
def test_a_stopped_rank_is_named_when_the_time_is_up(nursery: Nursery, victim: int) -> None:
    timeout_s = 1.0
    program = f"""
        import signal
        group = mh.init(timeout_s=20)
        group.barrier()
        if rank == {victim}:
            os.kill(os.getpid(), signal.SIGSTOP)
        attempt(group.barrier, timeout_s={timeout_s})
        os._exit(0)
    """
    with nursery.ranks(program) as ranks:
        others = [rank for rank in range(3) if rank != victim]
        ranks.start().wait(others)
        failures = {fact["rank"]: fact for fact in ranks.facts if fact["what"] == "raised"}
    assert sorted(failures) == others
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("DeadlineError", victim), failure
        assert f"rank {victim}" in failure["text"]
        assert failure["took"] < timeout_s + 4


_STOPS_RANK_0 = """
    group = mh.init(timeout_s=20)
    group.barrier()
    if rank == 0:
        tell("ready")
        def go():
            while True:
                time.sleep(1)
    else:
        def go():
            array = np.ones(10)
            {calls}
    attempt(go)
    attempt(group.barrier)
    os._exit(3)
"""


@pytest.mark.parametrize(
    "calls",
    [
        "group.barrier(timeout_s=0.5 * rank)",  # who gives up first breaks its connections to the others
        "group.all_reduce(array, timeout_s=1)",
        "while True: group.sendrecv(array, dest=(rank + 1) % 4, source=rank - 1, timeout_s=1)",
        "group.split(0, timeout_s=1)",
        "group.recv(source=rank - 1, timeout_s=2 - 0.5 * rank)",
    ],
)
@pytest.mark.parametrize("backend", ["tcp", pytest.param("shm", marks=pytest.mark.long)])
def test_where_rank_0_stands_still_every_survivor_says_that_and_names_nobody_else(
    nursery: Nursery, calls: str, backend: str
) -> None:
    with nursery.ranks(_STOPS_RANK_0.format(calls=calls), 4, MANYHANDS_BACKEND=backend) as ranks:
        ranks.start().await_facts("ready", 1)
        ranks.signal(0, signal.SIGSTOP)
        ranks.wait([1, 2, 3])
        failures = [fact for fact in ranks.facts if fact["what"] == "raised"]
    assert sorted(fact["rank"] for fact in failures) == [1, 1, 2, 2, 3, 3]
    assert {(fact["type"], fact["about"]) for fact in failures} == {("DeadlineError", 0)}, [
        (f["type"], f["text"]) for f in failures.values()
    ]
    assert len({fact["text"].splitlines()[0] for fact in failures}) == 1
    assert "rank 0 did not answer" in failures[0]["text"]


def test_a_rank_0_that_goes_on_takes_nobody_for_lost_who_gave_up_because_of_it(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        group.barrier()
        tell("ready")
        if rank:
            attempt(group.barrier, timeout_s=0.5)
            os._exit(3)
        until_told_to_go()
        attempt(group.barrier)
    """
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("ready")
        ranks.signal(0, signal.SIGSTOP)
        ranks.wait([1, 2, 3])
        ranks.go()
        ranks.signal(0, signal.SIGCONT)
        failures = ranks.raised()
    assert {(fact["type"], fact["about"]) for fact in failures.values()} == {("DeadlineError", 0)}, [
        (f["type"], f["text"]) for f in failures.values()
    ]


def test_whom_a_late_rank_waits_for_is_not_named_where_it_waits_for_a_stopped_one(nursery: Nursery) -> None:
    program = """
        import signal
        group = mh.init(timeout_s=20)
        group.barrier()
        if rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        attempt(group.recv, source=rank + 1, timeout_s=1 + rank)
        os._exit(3)
    """
    with nursery.ranks(program, 4) as ranks:
        ranks.start().wait([0, 1, 2])
        failures = [fact for fact in ranks.facts if fact["what"] == "raised"]
    assert [(fact["type"], fact["about"]) for fact in failures] == [("DeadlineError", 3)] * 3, [
        (f["type"], f["text"]) for f in failures.values()
    ]


def test_a_stopped_rank_that_goes_on_learns_what_the_others_decided(nursery: Nursery) -> None:
    program = """
        import signal
        group = mh.init(timeout_s=20)
        group.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        attempt(group.barrier, timeout_s=0.5)
        if rank != 1:
            tell("knows")
    """
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("knows", 2)
        ranks.signal(1, signal.SIGCONT)
        failures = ranks.raised()
    assert {fact["type"] for fact in failures.values()} == {"DeadlineError"}
    assert len({fact["text"] for fact in failures.values()}) == 1


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_leaves_without_a_word_is_lost(nursery: Nursery, victim: int) -> None:
    program = f"""
        group = mh.init(timeout_s=20)
        if rank == {victim}:
            group.barrier()
            tell("leaving")
            os._exit(0)
        attempt(lambda: (group.barrier(), group.barrier()))
    """
    with nursery.ranks(program) as ranks:
        left_at = ranks.start().await_facts("leaving", 1)[0]["at"]
        assert_lost(ranks, victim, left_at)


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_closes_while_others_wait_for_it_did_not_make_the_same_calls(nursery: Nursery, leaver: int) -> None:
    program = f"""
        with mh.init(timeout_s=20) as group:
            group.barrier()
            if rank != {leaver}:
                attempt(group.all_reduce, np.zeros(3))
            else:
                attempt(group.close)
    """
    with nursery.ranks(program) as ranks:
        failures = ranks.start().raised()
    assert sorted(failures) == [0, 1, 2]
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("CollectiveMismatchError", leaver)
        assert f"rank {leaver} has closed its group" in failure["text"]
        assert "all_reduce #1" in failure["text"]
        assert failure["took"] < SOON_S


def test_a_rank_that_ends_without_close_leaves_as_if_it_had(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        group.barrier()
        tell("ended")
    """
    with nursery.ranks(program) as ranks:
        assert ranks.start().wait() == {0: 0, 1: 0, 2: 0}
        assert ranks.output() == ""


def test_a_rank_that_ends_early_without_close_is_found_by_those_that_wait(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        group.barrier()
        if rank != 1:
            attempt(group.recv, 1)
    """
    with nursery.ranks(program) as ranks:
        failures = ranks.start().raised()
    assert {rank: (fact["type"], fact["about"]) for rank, fact in failures.items()} == dict.fromkeys(
        (0, 2), ("CollectiveMismatchError", 1)
    )
    assert max(fact["took"] for fact in failures.values()) < SOON_S


RAISING = {
    "inside with": """
        with mh.init(timeout_s=20) as group:
            if rank == 1:
                group.barrier()
                raise ValueError("no such digit: 11\\nmore of it")
            attempt(lambda: (group.barrier(), group.all_reduce(np.zeros(3))))
    """,
    "outside with": """
        group = mh.init(timeout_s=20)
        if rank == 1:
            group.barrier()
            raise ValueError("no such digit: 11\\nmore of it")
        attempt(lambda: (group.barrier(), group.all_reduce(np.zeros(3))))
    """,
}


@pytest.mark.parametrize("where", RAISING)
def test_an_exception_on_one_rank_reaches_all(nursery: Nursery, where: str) -> None:
    with nursery.ranks(RAISING[where]) as ranks:
        failures = ranks.start().raised()
        assert ranks.codes == {0: 0, 1: 1, 2: 0}
        assert ranks.output(1).rstrip().endswith("ValueError: no such digit: 11\nmore of it")
    assert sorted(failures) == [0, 2]
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("AbortedError", 1)
        assert failure["text"] == "rank 1 ended with ValueError: no such digit: 11"
        assert failure["took"] < SOON_S


EXITING = {
    "inside with": """
        with mh.init(timeout_s=20) as group:
            if rank == 1:
                group.barrier()
                sys.exit(3)
            attempt(lambda: (group.barrier(), group.recv(1)))
    """,
    "outside with": """
        group = mh.init(timeout_s=20)
        if rank == 1:
            group.barrier()
            sys.exit(3)
        attempt(lambda: (group.barrier(), group.recv(1)))
    """,
}


@pytest.mark.parametrize("where", EXITING)
def test_sys_exit_on_one_rank_frees_the_others(nursery: Nursery, where: str) -> None:
    with nursery.ranks(EXITING[where]) as ranks:
        failures = ranks.start().raised()
        assert ranks.codes[1] == 3
    assert sorted(failures) == [0, 2]
    for failure in failures.values():
        # Outside a `with` the exit code cannot be known: the rank has left, and the others waited for it.
        assert failure["type"] in ("AbortedError", "CollectiveMismatchError"), [
            (f["type"], f["text"]) for f in failures.values()
        ]
        assert failure["about"] == 1
        assert failure["took"] < SOON_S


def test_ctrl_c_in_one_rank_frees_the_others(nursery: Nursery) -> None:
    program = """
        with mh.init(timeout_s=20) as group:
            group.barrier()
            tell("running")
            # Another thread could send: without it these ranks, which wait for each other, would be told so on a slow machine.
            threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
            if rank == 1:
                group.recv(0)
            attempt(group.recv, 1)
    """
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("running")
        interrupted_at = ranks.signal(1, signal.SIGINT)
        failures = ranks.raised()
        assert ranks.codes[1] == -signal.SIGINT
    assert sorted(failures) == [0, 2]
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("AbortedError", 1)
        assert "KeyboardInterrupt" in failure["text"]
        assert failure["ended"] - interrupted_at < SOON_S


def test_after_a_failure_each_later_call_raises_the_same_cause(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        if rank == 2:
            group.barrier()
            os._exit(1)
        attempt(lambda: (group.barrier(), group.barrier()))
        x = np.zeros(3)
        for call in (group.barrier, lambda: group.all_reduce(x), lambda: group.send(x, 1 - rank), lambda: group.recv(2),
                     lambda: group.sendrecv(x, 1 - rank, 1 - rank), lambda: group.scatter(np.zeros(3)), lambda: group.all_to_all(x)):
            attempt(call)
        tell("shown", text=repr(group))
        group.close()  # has been told, so it says nothing more
        attempt(group.barrier)
    """
    with nursery.ranks(program) as ranks:
        ranks.start().wait()
        assert ranks.codes == {0: 0, 1: 0, 2: 1}
        shown = ranks.await_facts("shown", 2)
    assert all("failed" in fact["text"] for fact in shown)
    for rank in (0, 1):
        causes = [(f["type"], f["about"], f["text"]) for f in ranks.facts if f["what"] == "raised" and f["rank"] == rank]
        assert len(causes) == 9
        assert len(set(causes[:8])) == 1
        assert causes[0][:2] == ("PeerLostError", 2)
        assert causes[8][0] == "ClosedError"


def test_a_failure_that_no_call_has_told_is_told_by_close(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        if rank == 1:
            os._exit(1)
        until_failed(group)
        attempt(group.close)
        attempt(group.close)
    """
    with nursery.ranks(program, 2) as ranks:
        ranks.start().wait()
    ends = [(fact["what"], fact.get("type")) for fact in ranks.facts]
    assert ends == [("raised", "PeerLostError"), ("returned", None)]


@pytest.mark.parametrize(
    ("call", "operation", "number"),
    [
        ("group.all_reduce(np.ones(3))", "all_reduce", 2),
        ("work.wait()", "all_reduce", 2),
        ("group.recv(source=1)", "recv from rank 1", 1),
        ("group.split(0)", "split", None),
        ("group.broadcast_object({}, root=1)", "broadcast_object", 2),
        ("until_failed(group) or group.all_gather(np.ones(3))", "all_gather", 2),  # it had failed before
        ("until_failed(group) or group.split(0)", "split", None),
    ],
)
def test_who_loses_a_rank_is_told_which_call_that_ended(
    nursery: Nursery, call: str, operation: str, number: int | None
) -> None:
    program = f"""
        import pickle
        group = mh.init(timeout_s=20)
        group.barrier()
        group.barrier()
        if rank == 1:
            until_told_to_go()
            os._exit(1)
        work = {"group.all_reduce_async(np.ones(3))" if call == "work.wait()" else None}
        tell("calling")
        for _ in range(2):  # a later call is told of the same one
            error = attempt(lambda: {call})
            for each in error, pickle.loads(pickle.dumps(error)):
                tell("ended", call=[type(each).__name__, each.peer, each.operation, each.sequence])
        attempt(group.all_to_all, np.ones(3))
        os._exit(0)
    """
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("calling", 2)
        ranks.go()
        ranks.wait([0, 2])
        ends = [fact["call"] for fact in ranks.facts if fact["what"] == "ended"]
        assert {fact["operation"] for fact in ranks.facts if fact["what"] == "raised"} == {operation}
    assert ends == [["PeerLostError", 1, operation, number]] * 8


def test_an_error_survives_pickling_with_all_that_it_knows(nursery: Nursery) -> None:
    program = """
        import pickle
        with mh.init(timeout_s=20) as group:
            error = attempt(group.all_reduce, np.zeros(3 + rank))
            copy = pickle.loads(pickle.dumps(error))
            assert type(copy) is type(error) is mh.CollectiveMismatchError
            assert (str(copy), copy.rank, copy.peer, copy.operation, copy.sequence) == (
                str(error), rank, error.peer, "all_reduce", 0), vars(copy)
            tell("same")
    """
    with nursery.ranks(program, 2) as ranks:
        ranks.start().wait()
        assert len(ranks.await_facts("same")) == 2
        assert ranks.output() == ""
