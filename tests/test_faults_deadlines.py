"""Deadlines, several threads on one group, closing it under a call, and what is left open afterwards."""

from __future__ import annotations

import signal

import pytest
from fault_tools import Nursery
from worlds import free_port

TIMEOUT_S = 0.4
# Every operation, as ranks 0 and 1 call it while rank 2 never does.
OPERATIONS = {
    "all_reduce": "group.all_reduce(x, timeout_s=T)",
    "reduce": "group.reduce(x, root=2, timeout_s=T)",
    "broadcast": "group.broadcast(x, root=0, timeout_s=T)",
    "broadcast from the late rank": "group.broadcast(x, root=2, timeout_s=T)",
    "all_gather": "group.all_gather(x, timeout_s=T)",
    "gather": "group.gather(x, root=1, timeout_s=T)",
    "scatter": "group.scatter(x, root=0, timeout_s=T)",
    "reduce_scatter": "group.reduce_scatter(x, timeout_s=T)",
    "all_to_all": "group.all_to_all(x, timeout_s=T)",
    "all_to_all, uneven": "group.all_to_all(x, send_counts=[1, 1, 1], timeout_s=T)",
    "gather, uneven": "group.gather(x, uneven=True, timeout_s=T)",
    "barrier": "group.barrier(timeout_s=T)",
    "recv": "group.recv(2, timeout_s=T)",
    "send": "group.send(np.zeros(4 << 20), 2, timeout_s=T)",
    "sendrecv": "group.sendrecv(x, 1 - rank, 2, timeout_s=T)",
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_ends_at_its_deadline_and_names_who_is_late(nursery: Nursery, operation: str) -> None:
    program = f"""
        T = {TIMEOUT_S}
        group = mh.init(timeout_s=20)
        group.barrier()
        x = np.zeros(3)
        if rank < 2:
            attempt(lambda: {OPERATIONS[operation]})
        else:
            until_failed(group)
            attempt(group.barrier)
    """
    with nursery.ranks(program) as ranks:
        failures = ranks.start().raised()
    assert sorted(failures) == [0, 1, 2]
    assert {failure["type"] for failure in failures.values()} == {"DeadlineError"}
    assert {failure["about"] for failure in failures.values()} == {2}, failures[0]
    assert len({failure["text"] for failure in failures.values()}) == 1
    text = failures[0]["text"]
    assert f"within {TIMEOUT_S:g} s" in text
    assert text.startswith(operation.partition(" ")[0].rstrip(","))
    assert "rank 2: in no call; the last was barrier() #0" in text
    for rank in (0, 1):
        assert TIMEOUT_S - 0.05 <= failures[rank]["took"] < TIMEOUT_S + 4


def test_who_has_closed_does_not_stay_for_one_that_is_stopped_when_the_job_has_failed(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        tell("running")
        if rank == 0:
            attempt(group.close, timeout_s=0.3)
        elif rank == 1:
            until_told_to_go()
        else:
            until_told_to_go()
            attempt(group.recv, 1, timeout_s=0.5)
    """
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("running")
        ranks.await_facts("returned", 1)
        ranks.signal(1, signal.SIGSTOP)
        ranks.go()
        assert [fact["type"] for fact in ranks.await_facts("raised", 1)] == ["DeadlineError"]
        assert ranks.wait([0, 2], timeout_s=10) == {0: 0, 2: 0}


def test_close_ends_at_its_deadline_and_the_others_may_go_on(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        if rank == 0:
            attempt(group.close, timeout_s=0.3)
        elif rank == 1:
            until_told_to_go()
            group.send(np.ones(1), 2)
            attempt(group.close)
        else:
            until_told_to_go()
            group.recv(1)
            attempt(group.close)
    """
    with nursery.ranks(program) as ranks:
        took = ranks.start().await_facts("returned", 1)[0]["took"]
        ranks.go()
        assert ranks.wait() == {0: 0, 1: 0, 2: 0}
        assert len(ranks.await_facts("returned")) == 3
    assert 0.25 < took < 5


def test_recv_with_a_deadline_names_the_rank_that_it_waits_for(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        group.barrier()
        if rank == 0:
            attempt(group.recv, 1, timeout_s=0.3)
        else:
            attempt(group.recv, 0)
    """
    with nursery.ranks(program) as ranks:
        failure = ranks.start().raised()[0]
    assert (failure["type"], failure["about"]) == ("DeadlineError", 1)
    assert "recv from rank 1" in failure["text"]
    assert "rank 0 waits for rank 1" in failure["text"]


def test_a_rank_that_comes_late_but_in_time_is_waited_for(nursery: Nursery) -> None:
    program = """
        with mh.init(timeout_s=20) as group:
            group.barrier()
            if rank == 1:
                time.sleep(1.2)
            tell("sum", value=float(group.all_reduce(np.ones(1))[0]))
    """
    with nursery.ranks(program) as ranks:
        ranks.start().wait()
        assert [fact["value"] for fact in ranks.await_facts("sum")] == [3.0] * 3


LATE = {
    "all_reduce": "float(group.all_reduce(x)[0])",
    "send and recv": "group.send(x, 1) if rank == 0 else float(group.recv(0)[0])",
}


@pytest.mark.parametrize("operation", LATE)
def test_a_rank_that_takes_no_data_for_long_is_late_and_not_lost(nursery: Nursery, operation: str) -> None:
    """The patience with silence, 2 s here, must not hold for a rank that is alive and busy elsewhere."""
    program = f"""
        with mh.init(timeout_s=20, config={{"liveness": {{"heartbeat_s": 1, "patience_s": 2}}}}) as group:
            x = np.ones(8 << 20)
            group.barrier()
            if rank == 1:
                time.sleep(3.5)
            tell("got", value={LATE[operation]})
    """
    with nursery.ranks(program, 2) as ranks:
        ranks.start().wait()
        assert ranks.output() == ""
        values = [fact["value"] for fact in ranks.await_facts("got")]
    assert values == ([2.0, 2.0] if operation == "all_reduce" else [None, 1.0])


def test_a_thread_that_finds_the_group_busy_gives_up_alone(nursery: Nursery) -> None:
    program = """
        with mh.init(timeout_s=20) as group:
            if rank == 0:
                thread = threading.Thread(target=lambda: group.all_reduce(np.ones(1)))
                thread.start()
                until_blocked(thread)
                attempt(group.barrier, timeout_s=0.2)
                group.send(np.zeros(1), 1)
                thread.join()
            else:
                group.recv(0)
                group.all_reduce(np.ones(1))
            tell("sum", value=float(group.all_reduce(np.ones(1))[0]))
    """
    with nursery.ranks(program, 2) as ranks:
        failures = ranks.start().raised()
        assert [fact["value"] for fact in ranks.await_facts("sum")] == [2.0] * 2
    assert failures[0]["type"] == "DeadlineError"
    assert "an earlier collective on this group was still running; nothing was sent" in failures[0]["text"]


def test_a_thread_that_finds_a_direction_busy_gives_up_alone(nursery: Nursery) -> None:
    program = """
        with mh.init(timeout_s=20) as group:
            if rank == 0:
                thread = threading.Thread(target=group.recv, args=(1,))
                thread.start()
                until_blocked(thread)
                attempt(group.recv, 1, timeout_s=0.2)
                group.send(np.zeros(1), 1)
                thread.join()
            else:
                group.recv(0)
                group.send(np.zeros(1), 0)
            group.barrier()
            tell("done")
    """
    with nursery.ranks(program, 2) as ranks:
        failures = ranks.start().raised()
        assert len(ranks.await_facts("done")) == 2
    assert failures[0]["type"] == "DeadlineError"
    assert failures[0]["about"] == 1
    assert "nothing was sent" in failures[0]["text"]


@pytest.mark.parametrize("call", ["group.barrier()", "group.recv(1)", "group.send(np.zeros(4 << 20), 1)"])
def test_close_from_another_thread_wakes_a_call(nursery: Nursery, call: str) -> None:
    program = f"""
        group = mh.init(timeout_s=20)
        group.barrier()
        if rank == 0:
            def close():
                until_blocked(threading.main_thread())
                tell("closing")
                group.close(timeout_s=0.5)
                tell("closed")
            thread = threading.Thread(target=close)
            thread.start()
            attempt(lambda: {call})
            thread.join()
        else:
            until_told_to_go()
            group.close()
    """
    with nursery.ranks(program, 2) as ranks:
        closing = ranks.start().await_facts("closing", 1)[0]["at"]
        ranks.await_facts("closed", 1)
        ranks.go()
        failure = ranks.raised()[0]
    assert failure["type"] == "ClosedError", failure
    assert failure["ended"] - closing < 5


LEAKS = """
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()
"""


def test_fifty_groups_leave_nothing_open(nursery: Nursery) -> None:
    program = (
        LEAKS
        + """
    for number in range(50):
        with mh.init(timeout_s=20) as group:
            group.all_reduce(np.ones(1))
            group.sendrecv(np.ones(1), 1 - rank, 1 - rank)
        if number == 0:
            first = held()
    tell("held", first=first, last=held())
    """
    )
    with nursery.ranks(program, 2) as ranks:
        ranks.start().wait()
        held = ranks.await_facts("held")
        assert ranks.output() == ""
    for fact in held:
        assert fact["first"] == fact["last"]
        assert fact["last"][1] == 1


def test_groups_that_failed_leave_nothing_open(nursery: Nursery) -> None:
    program = (
        LEAKS
        + """
    before = held()
    for number in range(5):
        group = mh.init(timeout_s=20)
        attempt(group.all_reduce, np.ones(1 + rank))
        group.close()
        if number == 0:
            first = held()
    tell("held", first=first, last=held(), before=before)
    """
    )
    with nursery.ranks(program, 2) as ranks:
        ranks.start().wait()
        held = ranks.await_facts("held")
    for fact in held:
        assert fact["first"] == fact["last"]
        assert fact["last"][1] == fact["before"][1] == 1


def test_an_init_that_failed_leaves_nothing_open(nursery: Nursery) -> None:
    program = (
        LEAKS
        + """
    before = None
    for number in range(3):
        attempt(mh.init, timeout_s=0.6)
        before = before or held()
    tell("held", before=before, after=held())
    """
    )
    with nursery.ranks(program, 3) as lonely:
        lonely.start(0).wait()
        lonely.start(1).wait()
        facts = lonely.await_facts("held", 2)
        raised = [fact["type"] for fact in lonely.facts if fact["what"] == "raised"]
    assert raised == ["DeadlineError"] * 3 + ["RendezvousError"] * 3
    for fact in facts:
        assert fact["before"] == fact["after"]
        assert fact["after"][1] == 1


def test_two_groups_one_after_the_other_at_a_fixed_port(nursery: Nursery) -> None:
    program = """
        for number in range(2):
            with mh.init(timeout_s=20) as group:
                tell("sum", value=float(group.all_reduce(np.ones(1))[0]))
    """
    with nursery.ranks(program, MASTER_PORT=str(free_port())) as ranks:
        ranks.start().wait()
        assert ranks.output() == ""
        assert [fact["value"] for fact in ranks.await_facts("sum", 6)] == [3.0] * 6


def test_a_group_after_one_that_failed_in_the_same_processes(nursery: Nursery) -> None:
    program = """
        with mh.init(timeout_s=20) as group:
            attempt(group.all_reduce, np.ones(1 + rank))
        with mh.init(timeout_s=20) as group:
            tell("sum", value=float(group.all_reduce(np.ones(1))[0]))
    """
    with nursery.ranks(program) as ranks:
        ranks.start().wait()
        assert ranks.output() == ""
        assert [fact["value"] for fact in ranks.await_facts("sum")] == [3.0] * 3
