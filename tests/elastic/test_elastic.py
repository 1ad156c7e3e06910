"""`oneaccord.elastic`: a function that goes on with those that are left, from what was committed last."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from support.fault_tools import Nursery

import oneaccord as oa
from oneaccord_simulated.running import Simulation

TRAINING = """
@oa.elastic(state=lambda: {"step": 0, "trail": [], "weights": np.zeros(3)}, timeout_s=30)
def train(group, generation, state, steps):
    tell("generation", number=generation, step=state["step"], now=group.rank, of=group.world_size)
    while state["step"] < steps:
        at_step(group, generation, state)
        total = group.all_reduce(np.ones(3))
        state["weights"] += total / group.world_size
        state["trail"].append(group.world_size)
        state["step"] += 1
        state.commit()
    return state
"""
ENDING = """
state = train(STEPS)
assert state["weights"].tolist() == [STEPS] * 3 and len(state["trail"]) == STEPS, state
tell("ended", trail=state["trail"])
"""


@pytest.mark.parametrize("victims", [(3,), (2, 0, 1)])
def test_training_goes_on_with_those_that_are_left_from_the_last_commit(nursery: Nursery, victims: tuple[int, ...]) -> None:
    program = (
        f"""
STEPS, victims = 60, {victims}
def at_step(group, generation, state):
    if generation < len(victims) and state["step"] == 10 * (generation + 1):
        group.barrier()  # all have committed the step before
        if rank == victims[generation]:
            os.kill(os.getpid(), 9)
"""
        + TRAINING
        + ENDING
    )
    with nursery.ranks(program, 4) as ranks:
        ended = ranks.start().await_facts("ended", 4 - len(victims))
        codes = ranks.wait()
    assert len({str(fact["trail"]) for fact in ended}) == 1
    trail = ended[0]["trail"]
    assert sorted(trail, reverse=True) == trail
    assert set(trail) == set(range(4 - len(victims), 5))
    assert [codes[fact["rank"]] for fact in ended] == [0] * len(ended)
    for number in range(1, len(victims) + 1):
        told = [fact for fact in ranks.facts if fact["what"] == "generation" and fact["number"] == number]
        assert len(told) == 4 - number
        assert len({fact["step"] for fact in told}) == 1
        assert told[0]["step"] == 10 * number


def test_who_is_behind_gets_the_state_of_who_has_committed_last(nursery: Nursery) -> None:
    """The last call of the victim ends on one rank, and not on the other one, which goes on from what the first one has."""
    program = (
        """
STEPS = 8
def at_step(group, generation, state):
    if generation == 0 and state["step"] == 5:
        if rank == 0:  # has done step 5 already
            state["weights"] += 1
            state["trail"].append(7)
            state["pair"] = (1, 2)
            state["step"] += 1
            state.commit()
            tell("ahead")
        if rank == 2:
            until_told_to_go()
            os._exit(3)
    if generation == 0 and state["step"] == 6:
        state["weights"][:] = np.nan  # not committed
"""
        + TRAINING
        + ENDING.replace("trail=", "pair=repr(state['pair']), trail=")
    )
    with nursery.ranks(program, 3) as ranks:
        ranks.start().await_facts("ahead", 1)
        ranks.go()
        ended = ranks.await_facts("ended", 2)
        ranks.wait()
    assert [fact["trail"] for fact in ended] == [[3] * 5 + [7] + [2] * 2] * 2
    assert [fact["pair"] for fact in ended] == ["(1, 2)"] * 2


def test_who_has_returned_goes_on_with_the_others_where_one_dies_before_it_has(nursery: Nursery) -> None:
    program = (
        """
STEPS = 3
def at_step(group, generation, state):
    pass
"""
        + TRAINING.replace(
            "    return state\n",
            "    tell('through')\n    if rank == 1 and generation == 0:\n        until_told_to_go()\n        os._exit(3)\n    return state\n",
        )
        + ENDING
    )
    with nursery.ranks(program, 3) as ranks:
        ranks.start().await_facts("through")
        ranks.go()
        ended = ranks.await_facts("ended", 2)
        ranks.wait()
    assert [fact["trail"] for fact in ended] == [[3] * 3] * 2
    assert [fact["number"] for fact in ranks.facts if fact["what"] == "generation"].count(1) == 2


def test_another_exception_passes_through_and_the_others_go_on_without_that_rank(nursery: Nursery) -> None:
    program = (
        """
STEPS = 6
def at_step(group, generation, state):
    if state["step"] == 4 and generation == 0:
        tell("there")
        if rank == 1:
            until_told_to_go()
            raise ValueError("enough")
"""
        + TRAINING
        + "if rank == 1:\n    attempt(train, STEPS)\n    sys.exit()\n"
        + ENDING
    )
    with nursery.ranks(program, 3) as ranks:
        ranks.start().await_facts("there")
        ranks.go()
        ended = ranks.await_facts("ended", 2)
        ranks.wait()
    assert [fact["trail"] for fact in ended] == [[3] * 4 + [2] * 2] * 2
    (raised,) = [fact for fact in ranks.facts if fact["what"] == "raised"]
    assert (raised["rank"], raised["type"], raised["text"]) == (1, "ValueError", "enough")


@pytest.mark.parametrize(
    ("failing", "kind", "generations"),
    [
        ("group.all_reduce(np.ones(1 + rank))", "CollectiveMismatchError", 1),
        ("group.barrier(); group.revoke() if rank == 1 else group.barrier()", "AbortedError", 3),
    ],
)
def test_what_would_fail_for_ever_is_raised_on_all_ranks(nursery: Nursery, failing: str, kind: str, generations: int) -> None:
    program = f"""
@oa.elastic
def train(group, generation, state):
    tell("generation", number=generation)
    {failing}
    group.barrier()
attempt(train)
"""
    with nursery.ranks(program, 2) as ranks:
        failures = ranks.start().await_facts("raised", 2)
        codes = ranks.wait()
    assert [fact["type"] for fact in failures] == [kind] * 2
    assert codes == {0: 0, 1: 0}
    assert len([fact for fact in ranks.facts if fact["what"] == "generation"]) == 2 * generations


def test_nothing_that_the_function_held_is_kept_after_a_failure(nursery: Nursery) -> None:
    """Not even behind the error that was being handled when the group failed: its frames would keep all arrays of a step until the next failure."""
    program = """
import gc, weakref
seen = []
def step(group, array):
    try:
        raise ValueError("in the middle of something")
    except ValueError:
        while True:
            group.all_reduce(array)
@oa.elastic(timeout_s=30)
def train(group, generation, state):
    if generation == 0:
        array = np.ones(9)
        seen.append(weakref.ref(array))
        if rank == 1:
            os.kill(os.getpid(), 9)
        step(group, array)
    gc.collect()
    tell("kept", kept=seen[0]() is not None)
train()
"""
    with nursery.ranks(program, 3) as ranks:
        kept = ranks.start().await_facts("kept", 2)
        ranks.wait()
    assert [fact["kept"] for fact in kept] == [False, False]


def test_it_is_called_once_where_nothing_fails_and_rank_0s_state_is_that_of_all() -> None:
    made = []

    def start() -> dict[str, Any]:
        made.append(1)
        return {"a": [1, 2.5], "b": {"c": oa.sleep.__name__}}

    @oa.elastic(state=start)
    def train(group: oa.Group, generation: int, state: oa.ElasticState, plus: int, *, times: int) -> Any:
        """Train."""
        assert generation == 0
        return dict(state), group.world_size, plus * times

    assert train.__doc__ == "Train."

    done = Simulation(3).execute(lambda rank: train(rank, times=2))
    assert done.results == [({"a": [1, 2.5], "b": {"c": "sleep"}}, 3, 2 * rank) for rank in range(3)]
    assert len(made) == 1


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(oa.UsageError, match="state must be a dict"):
        oa.elastic(state=[1])  # type: ignore[call-overload]


def test_a_rank_that_is_stopped_is_named_and_nobody_goes_on_beside_it(nursery: Nursery) -> None:
    program = """
@oa.elastic(timeout_s=5)
def train(group, generation, state):
    tell("running")
    while True:
        group.all_reduce(1, timeout_s=2)
attempt(train)
"""
    with nursery.ranks(program, 3) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(2, signal.SIGSTOP)
        failures = ranks.await_facts("raised", 2)
        assert [(fact["type"], fact["about"], fact["operation"]) for fact in failures] == [("DeadlineError", 2, "shrink")] * 2
