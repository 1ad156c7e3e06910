"""Ranks that fork: the child keeps nothing of its parent's job, and the job nothing of the child."""

from __future__ import annotations

import os
import signal

import pytest
from support.fault_tools import LONG_BEFORE_S, Nursery

FORKS = {
    "os.fork, which ends at once": """
        child = os.fork()
        if not child:
            in_child()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    """,
    "os.fork, which ends as any Python": """
        child = os.fork()
        if not child:
            in_child()
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    """,
    "os.fork, which fails": """
        child = os.fork()
        if not child:
            in_child()
            sys.stderr.close()
            raise ValueError("a child's own affair")
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 1
    """,
    "multiprocessing": """
        process = multiprocessing.get_context("fork").Process(target=in_child)
        process.start()
        process.join()
        code = process.exitcode
    """,
}


@pytest.mark.parametrize(("fork", "forker"), [*((fork, 1) for fork in FORKS), ("os.fork, which ends as any Python", 0)])
def test_a_child_cannot_use_the_group_and_does_not_disturb_it(nursery: Nursery, fork: str, forker: int) -> None:
    program = f"""
def fork():
    {FORKS[fork].replace(chr(10) + "    ", chr(10)).strip()}
    return code

import multiprocessing
faulthandler.cancel_dump_traceback_later()  # a child that ends as any Python would wait for its thread

with oa.init(timeout_s=30) as group:
    def in_child():
        for call in (group.barrier, lambda: group.all_reduce(np.ones(1)), lambda: group.send(np.ones(1), 1 - rank), group.close):
            attempt(call)
    group.barrier()
    group.sendrecv(np.ones(1), 1 - rank, 1 - rank)
    if rank == {forker}:
        tell("child", code=fork())
    tell("sum", value=float(group.all_reduce(np.ones(1))[0]), got=float(group.sendrecv(np.ones(1), 1 - rank, 1 - rank)[0]))
"""
    with nursery.ranks(program, 2) as ranks:
        assert ranks.start().wait() == {0: 0, 1: 0}, ranks.output()
        assert ranks.await_facts("child", 1)[0]["code"] == 0
        assert [(fact["value"], fact["got"]) for fact in ranks.await_facts("sum")] == [(2.0, 1.0)] * 2
        ended = [(fact["what"], fact.get("type")) for fact in ranks.facts if fact["what"] in ("raised", "returned")]
    assert ended == [("raised", "ClosedError")] * 3 + [("returned", None)]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_noticed_although_its_child_lives(nursery: Nursery, victim: int) -> None:
    program = f"""
        import signal
        group = oa.init(timeout_s=30)
        group.all_reduce(np.ones(1))
        if rank == {victim}:
            child = os.fork()
            if not child:
                signal.alarm(60)  # it ends in any case
                tell("running", pid=os.getpid())
                until_told_to_go()
                os._exit(0)
            time.sleep(60)
        tell("running")
        attempt(group.barrier)
    """
    with nursery.ranks(program) as ranks:
        child = next(fact["pid"] for fact in ranks.start().await_facts("running") if "pid" in fact)
        killed_at = ranks.signal(victim, signal.SIGKILL)
        failures = ranks.raised()
        os.kill(child, 0)  # raises if it is no more
        ranks.go()
    assert sorted(failures) == [rank for rank in range(3) if rank != victim]
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("PeerLostError", victim)
        assert failure["ended"] - killed_at < LONG_BEFORE_S


def test_every_handle_says_in_a_child_that_it_was_inherited_and_what_to_do(nursery: Nursery) -> None:
    program = """
        import asyncio
        faulthandler.cancel_dump_traceback_later()
        with oa.init(timeout_s=30) as group:
            mesh = oa.DeviceMesh(group, (2, 1), ("a", "b"))
            half = group.split(0)
            work = group.recv_async(1 - rank)
            async def awaited(work):
                return await work
            def coalesced():
                with group.coalesce() as batch:
                    batch.all_reduce(np.ones(1))
            calls = {
                "all_reduce": lambda: group.all_reduce(np.ones(1)), "send": lambda: group.send(np.ones(1), 1 - rank),
                "recv": lambda: group.recv(1 - rank), "async": lambda: group.barrier_async(), "object": lambda: group.broadcast_object(1),
                "empty": lambda: group.empty(3), "split": lambda: group.split(0), "shrink": group.shrink, "coalesce": coalesced,
                "half": half.barrier, "mesh": lambda: mesh.group("a").barrier(), "new mesh": lambda: oa.DeviceMesh(group, (2,), ("a",)),
                "submesh": lambda: mesh.submesh("a"), "wait": work.wait, "done": work.done, "exception": work.exception,
                "callback": lambda: work.add_done_callback(print), "await": lambda: asyncio.run(asyncio.wait_for(awaited(work), 40)),
            }
            if rank == 0:
                child = os.fork()
                if not child:
                    for name, call in calls.items():
                        error = attempt(call)
                        tell("said", name=name, text=f"{type(error).__name__}: {error}")
                    group.close()
                    os._exit(0)
                tell("child", code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            group.send(np.ones(1), 1 - rank)
            work.wait()
    """
    with nursery.ranks(program, 2) as ranks:
        assert ranks.start().wait() == {0: 0, 1: 0}, ranks.output()
        assert ranks.await_facts("child", 1)[0]["code"] == 0
    said = {fact["name"]: fact["text"] for fact in ranks.facts if fact["what"] == "said"}
    assert len(said) == 18
    assert {name: text for name, text in said.items() if not text.startswith("ClosedError: ") or "fork" not in text} == {}
    assert {name for name, text in said.items() if "a pipe or a queue" not in text} == set()


def test_a_child_of_a_rank_that_calls_init_is_refused_in_words(nursery: Nursery) -> None:
    program = """
with oa.init(timeout_s=30) as group:
    group.barrier()
    child = os.fork()
    if not child:
        attempt(oa.init)
        attempt(lambda: oa.init(rank=0, world_size=1).close())
        os._exit(0)
    os.waitpid(child, 0)
    code = "import oneaccord as oa\\ntry: oa.init()\\nexcept oa.RendezvousError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    tell("child", printed=done.stdout, errors=done.stderr)
    tell("sum", value=float(group.all_reduce(np.ones(1))[0]))
code = "import os; print('ONEACCORD_JOINED' in os.environ)"
tell("after", printed=subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
"""
    with nursery.ranks("import subprocess\n" + program, 2) as ranks:
        assert ranks.start().wait() == {0: 0, 1: 0}, ranks.output()
        assert [fact["value"] for fact in ranks.await_facts("sum")] == [2.0] * 2
        assert [fact["printed"] for fact in ranks.await_facts("after")] == ["False\n"] * 2
        for fact in ranks.await_facts("child"):
            assert "was started by rank" in fact["printed"], fact["errors"]
            assert "only one process can be a rank" in fact["printed"]
        ended = sorted((fact["what"], fact.get("type")) for fact in ranks.facts if fact["what"] in ("raised", "returned"))
    assert ended == [("raised", "RendezvousError")] * 2 + [("returned", None)] * 2
