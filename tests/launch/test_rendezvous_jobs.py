"""Jobs side by side: the ranks of each find each other, and a stranger is told whose place it has come to."""

from __future__ import annotations

import itertools
import os
import socket

import pytest
from support.fault_tools import LONG_BEFORE_S, Nursery

from oneaccord.launchers.variables import derived_ports

JOB = str(int.from_bytes(os.urandom(5)))
"""A number that no test beside this one uses, and so other ports."""

AS_TASK = """
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    given = {"rank": int(os.environ["SLURM_PROCID"]) % 2, "world_size": 2} if "NUMBERED" in os.environ else {}
    group = attempt(oa.init, **given, timeout_s=float(os.environ.get("TIMEOUT", "40")))
    if isinstance(group, oa.Group):
        steps = group.all_gather(np.array([int(os.environ["SLURM_STEP_ID"])]))
        tell("met", step=os.environ["SLURM_STEP_ID"], steps=steps.tolist(), place=group._job.meeting.address)
        group.close()
"""


def task(step: int, rank: int, **more: str) -> dict[str, str]:
    """Return the variables of a task of a step of two tasks on one node; ``RANK`` is by which the test knows it."""
    return {
        "RANK": str(rank),
        "SLURM_JOB_ID": JOB,
        "SLURM_STEP_ID": str(step),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "n1",
        **more,
    }


def ports_of(step: int) -> tuple[int, ...]:
    return derived_ports(f"slurm {JOB}.{step}")


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def free_step() -> int:
    """Return a step whose first two ports are free."""
    return next(step for step in itertools.count() if all(map(is_free, ports_of(step)[:2])))


def steps_of_one_port() -> tuple[int, int]:
    """Return two steps that would meet at one port, and not at one second port."""
    seen: dict[int, int] = {}
    for step in itertools.count():
        first, second = ports_of(step)[:2]
        if first in seen and ports_of(seen[first])[1] != second and is_free(first) and is_free(second):
            return seen[first], step
        seen.setdefault(first, step)
    raise AssertionError


def test_steps_of_one_port_each_meet_their_own_ranks(nursery: Nursery) -> None:
    one, other = steps_of_one_port()
    with nursery.ranks(AS_TASK, 2) as ranks:
        ranks.start_as(10, **task(one, 0))
        with socket.socket() as probe:  # rank 0 of the first step has the port
            while probe.connect_ex(("127.0.0.1", ports_of(one)[0])):
                assert ranks.output() == ""
        ranks.start_as(20, **task(other, 0))
        ranks.start_as(21, **task(other, 1))
        assert [fact["steps"] for fact in ranks.await_facts("met", 2)] == [[other] * 2] * 2
        ranks.start_as(11, **task(one, 1))
        met = ranks.await_facts("met", 4)
        assert sorted(fact["steps"] for fact in met) == sorted([[one] * 2] * 2 + [[other] * 2] * 2)
        ports = {fact["step"]: fact["place"][1] for fact in met}
        assert ports == {str(one): ports_of(one)[0], str(other): ports_of(other)[1]}


def test_a_stranger_learns_both_jobs_and_rank_0_names_it(nursery: Nursery) -> None:
    with nursery.ranks(AS_TASK, 2) as ranks:
        place = f"127.0.0.1:{ranks.port}"
        ranks.start_as(1, **task(1, 1, ONEACCORD_RENDEZVOUS=place))  # it dials several times a second
        ranks.start_as(0, **task(0, 0, ONEACCORD_RENDEZVOUS=place, TIMEOUT="8"))
        raised = ranks.raised()
    assert raised[1]["type"] == "RendezvousError"
    words = (
        f"belongs to the job 'slurm {JOB}.1', but the job 'slurm {JOB}.0' meets at {place}: give each job an address of its own"
    )
    assert words in raised[1]["text"]
    assert raised[0]["type"] == "DeadlineError"
    assert "rank 1 of 2 did not come. Refused: rank 1 (process" in raised[0]["text"]
    assert f"belongs to the job 'slurm {JOB}.1'" in raised[0]["text"]


def test_a_run_id_and_a_step_are_both_compared(nursery: Nursery) -> None:
    with nursery.ranks(AS_TASK, 2, ONEACCORD_RUN_ID="mine") as ranks:
        place = f"127.0.0.1:{ranks.port}"
        ranks.start_as(0, **task(0, 0, ONEACCORD_RENDEZVOUS=place))
        ranks.start_as(1, **task(1, 1, ONEACCORD_RENDEZVOUS=place))
        ranks.wait([1])
        ranks.start_as(2, **task(0, 1, ONEACCORD_RENDEZVOUS=place))
        assert [fact["steps"] for fact in ranks.await_facts("met")] == [[0, 0]] * 2
        assert f"the job 'slurm {JOB}.1 mine', but the job 'slurm {JOB}.0 mine'" in ranks.raised()[1]["text"]


@pytest.mark.parametrize("speaks", [True, False])
def test_a_port_of_another_program_is_passed_by(nursery: Nursery, speaks: bool) -> None:
    step = free_step()
    with socket.create_server(("127.0.0.1", ports_of(step)[0])) as program, nursery.ranks(AS_TASK, 2) as ranks:
        program.settimeout(45)
        ranks.start_as(1, **task(step, 1))
        caller, _ = program.accept()
        with caller:
            if speaks:
                caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            ranks.start_as(0, **task(step, 0))
            assert [fact["place"][1] for fact in ranks.await_facts("met")] == [ports_of(step)[1]] * 2


def test_a_job_with_another_secret_is_passed_by(nursery: Nursery) -> None:
    one, other = steps_of_one_port()
    with nursery.ranks(AS_TASK, 2) as ranks:
        ranks.start_as(10, **task(one, 0, ONEACCORD_SECRET="of another user"))
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", ports_of(one)[0])):
                assert ranks.output() == ""
        ranks.start_as(20, **task(other, 0))
        ranks.start_as(21, **task(other, 1))
        assert [fact["steps"] for fact in ranks.await_facts("met")] == [[other] * 2] * 2


def test_another_secret_in_one_job_is_told_at_once(nursery: Nursery) -> None:
    with nursery.ranks(AS_TASK, 2) as ranks:
        ranks.start_as(0, **task(6, 0))
        ranks.start_as(1, **task(6, 1, ONEACCORD_SECRET="a wrong one"))
        (failure,) = ranks.await_facts("raised", 1)
    assert (failure["rank"], failure["type"]) == (1, "AuthenticationError")
    assert "the job at 127.0.0.1:" in failure["text"]
    assert failure["took"] < LONG_BEFORE_S


def test_rank_0_on_a_later_host_of_the_step_is_found(nursery: Nursery) -> None:
    places = {"SLURM_STEP_NODELIST": "127.0.0.[5-7]", "SLURM_STEP_NUM_NODES": "2", "SLURM_DISTRIBUTION": "arbitrary"}
    with nursery.ranks(AS_TASK, 2) as ranks:
        ranks.start_as(1, **task(7, 1, **places, SLURMD_NODENAME="127.0.0.5", SLURM_GTIDS="1"))
        ranks.start_as(0, **task(7, 0, **places, SLURMD_NODENAME="127.0.0.7", SLURM_GTIDS="0"))
        assert [(fact["steps"], fact["place"][0]) for fact in ranks.await_facts("met")] == [([7, 7], "127.0.0.7")] * 2


def test_parts_of_a_step_that_number_themselves_have_one_port(nursery: Nursery) -> None:
    with nursery.ranks(AS_TASK, 4, NUMBERED="1") as ranks:
        variables = [task(9, rank, SLURM_STEP_NUM_TASKS="4") for rank in range(4)]
        ranks.start_as(0, **variables[0])
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", ports_of(9)[0])):
                assert ranks.output() == ""
        ranks.start_as(2, **variables[2])
        ranks.wait([2])
        ranks.start_as(1, **variables[1])
        assert [fact["steps"] for fact in ranks.await_facts("met", 2)] == [[9, 9]] * 2
        assert "the port is in use" in ranks.raised()[2]["text"]


def test_a_missing_rank_0_is_told_with_all_places(nursery: Nursery) -> None:
    step = free_step()
    with nursery.ranks(AS_TASK, 2) as ranks:
        ranks.start_as(1, **task(step, 1, TIMEOUT="1"))
        failure = ranks.raised()[1]
    assert failure["type"] == "RendezvousError"
    assert f"rank 1 found rank 0 of 'slurm {JOB}.{step}' at none of 8 places within 1 s" in failure["text"]
    assert f"at 127.0.0.1:{ports_of(step)[0]}: Connection refused" in failure["text"]


KNOWN_LATER = """
    import socket
    real, asked = socket.getaddrinfo, []
    def known_later(host, *words, **more):
        if host == b"later.invalid" and not more["flags"] & socket.AI_NUMERICHOST:
            asked.append(host)
            if len(asked) < 4:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = b"127.0.0.1"
        return real(host, *words, **more)
    socket.getaddrinfo = known_later
    with oa.init(timeout_s=40) as group:
        tell("sum", sum=float(group.all_reduce(np.ones(1))[0]), asked=len(asked))
"""


def test_a_name_that_is_known_later_is_asked_for_again(nursery: Nursery) -> None:
    with nursery.ranks(KNOWN_LATER, 2, MASTER_ADDR="later.invalid") as ranks:
        met = ranks.start().await_facts("sum")
    assert [(fact["sum"], fact["asked"] >= 4) for fact in met] == [(2.0, True)] * 2
