"""`oneaccord run --max-restarts`: new ranks come in the place of those that have died, and get their state over the group."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from campaigns import campaign_elastic
from support import preloaded

from oneaccord.cli.main import main

TRAINING = """
import json, os, sys, time
import numpy as np
import oneaccord as oa

rank = os.environ["RANK"]

@oa.elastic(state=lambda: {"step": 0, "weights": np.zeros(3)}, timeout_s=30)
def train(group, generation, state):
    print(json.dumps({"generation": generation, "size": group.world_size, "step": state["step"], "is_new": "ONEACCORD_NEWCOMER" in os.environ}))
    while state["step"] < 40:
        at_step(group, generation, state)
        state["weights"] += group.all_reduce(np.ones(3), op="mean")
        state["step"] += 1
        state.commit()
    return state["weights"].tolist()
"""
DYING = """
def at_step(group, generation, state):
    # generation 0: rank 0 at step 10; generation 1: rank 1 at step 20; ...
    if generation < DEATHS and state["step"] == 10 * (generation + 1):
        group.barrier()  # all have committed the step before
        if rank == str(generation):
            os.kill(os.getpid(), 9)
"""
ENDING = """
assert train() == [40.0] * 3
"""


def generations(output: str) -> dict[int, list[dict[str, Any]]]:
    """Return what the ranks told when a generation began, by its number."""
    told: dict[int, list[dict[str, Any]]] = {}
    for line in re.findall(r"\{.*\}", output):
        fact = json.loads(line)
        told.setdefault(fact["generation"], []).append(fact)
    return told


def elastic(
    folder: Path, program: str, *options: str, bearing: Mapping[str, str] = preloaded.BEARING
) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(program, encoding="utf-8")
    words = ["-m", "oneaccord", "run", "--no-prefix", "--backend", "tcp", *options, script]
    return preloaded.run(words, cwd=folder, environ={**os.environ, **bearing})


def test_ranks_that_die_are_replaced_rank_0_too_and_then_the_world_shrinks(tmp_path: Path) -> None:
    program = TRAINING + "DEATHS = 3" + DYING + ENDING
    answer = elastic(tmp_path, program, "-n", "3", "--max-restarts", "2")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    told = generations(answer.stdout)
    assert {number: [fact["size"] for fact in facts] for number, facts in told.items()} == {
        0: [3] * 3,
        1: [3] * 3,
        2: [3] * 3,
        3: [2] * 2,
    }
    assert [{fact["step"] for fact in told[number]} for number in range(4)] == [{0}, {10}, {20}, {30}]  # newcomers as well
    assert [sum(fact["is_new"] for fact in told[number]) for number in range(4)] == [0, 1, 2, 2]
    assert "rank 0 failed (killed by SIGKILL), and another one comes in its place: restart 1 of 2" in answer.stderr
    assert "3 ranks failed, and all others ended well" in answer.stderr


def test_the_launcher_keeps_nothing_of_the_ranks_that_have_died(tmp_path: Path) -> None:
    counting = """
def held():
    server = open(f"/proc/{os.getppid()}/stat").read()  # which was started by the launcher
    return len(os.listdir(f"/proc/{server.rpartition(')')[2].split()[1]}/fd"))

before = 0
def at_step(group, generation, state):
    global before
    if rank == "0" and state["step"] == 5:
        before = held()
    if rank == "1" and generation < 3 and state["step"] == 10 * (generation + 1):
        os.kill(os.getpid(), 9)
    if rank == "0" and state["step"] == 35:
        until = time.monotonic() + 20
        while held() > before and time.monotonic() < until:
            time.sleep(0.01)
        assert held() <= before
"""
    answer = elastic(tmp_path, TRAINING + counting + ENDING, "-n", "2", "--max-restarts", "3")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert sorted(generations(answer.stdout)) == [0, 1, 2, 3]


def test_spares_come_in_after_a_failure_and_those_that_nobody_needs_are_ended(tmp_path: Path) -> None:
    program = TRAINING + "DEATHS = 1" + DYING + ENDING
    answer = elastic(tmp_path, program, "-n", "2", "--max-ranks", "4")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert {number: len(facts) for number, facts in generations(answer.stdout).items()} == {0: 2, 1: 3}
    calm = elastic(tmp_path, program.replace("DEATHS = 1", "DEATHS = 0"), "-n", "2", "--max-ranks", "3")
    assert calm.returncode == 0, calm.stdout + calm.stderr
    assert {number: len(facts) for number, facts in generations(calm.stdout).items()} == {0: 2}
    assert calm.stderr == ""


def test_with_fewer_ranks_than_there_must_be_the_job_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    answer = elastic(tmp_path, TRAINING + "DEATHS = 1" + DYING + ENDING, "-n", "3", "--min-ranks", "3")
    assert answer.returncode == 137
    assert (
        "PeerLostError: 2 ranks are left, and the job needs 3 or more to continue (--min-ranks): start it anew" in answer.stderr
    )


def test_where_all_members_have_died_the_job_ends_and_nobody_waits_at_the_door(tmp_path: Path) -> None:
    program = (
        TRAINING
        + 'def at_step(group, generation, state):\n    if state["step"] == 5:\n        os.kill(os.getpid(), 9)\n'
        + ENDING
    )
    answer = elastic(tmp_path, program, "-n", "2", "--max-restarts", "1", bearing={})  # nobody else has anything to say
    assert answer.returncode == 137, answer.stdout + answer.stderr


@pytest.mark.parametrize("gap_s", [0.0, pytest.param(0.02, marks=pytest.mark.long)])
def test_those_that_are_left_meet_again_where_the_store_and_its_successor_die_together(tmp_path: Path, gap_s: float) -> None:
    dying = f"""
def at_step(group, generation, state):
    if generation == 0 and state["step"] == 10:
        pids = group.all_gather_object(os.getpid())
        if rank == "2":
            os.kill(pids[0], 9)
            time.sleep({gap_s})
            os.kill(pids[1], 9)
"""
    answer = elastic(tmp_path, TRAINING + dying + ENDING, "-n", "4", "--max-restarts", "2")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    told = generations(answer.stdout)
    last = max(told)  # where the second death comes late, there may be a generation between the two
    assert [(fact["size"], fact["step"]) for fact in told[last]] == [(4, told[last][0]["step"])] * 4
    assert told[last][0]["step"] in (10, 11)
    assert "2 ranks failed, and all others ended well" in answer.stderr


def test_the_deaths_of_the_store_and_its_successor_are_told_alike(tmp_path: Path) -> None:
    program = """
import os
import numpy as np
import oneaccord as oa
from oneaccord.control import timing

timing.COMING_S = 5.0  # how long they look for each other before each speaks for itself: a busy machine must not matter
group = oa.init()
try:
    pids = group.all_gather_object(os.getpid())
    if group.rank == 4:
        os.kill(pids[0], 9)
        os.kill(pids[1], 9)
    while True:
        group.all_reduce(np.ones(3))
except oa.PeerLostError as error:
    print(error.peer, error.args[0])
group.shrink(timeout_s=30).close()
"""
    answer = elastic(tmp_path, program, "-n", "5", "--min-ranks", "3")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    told = answer.stdout.splitlines()
    assert len(told) == 3
    assert len(set(told)) == 1, told
    assert re.match("[01] rank [01] was lost", told[0])


def test_a_world_of_one_lets_newcomers_in_without_a_failure(tmp_path: Path) -> None:
    waiting = """
def at_step(group, generation, state):
    open("alone", "w").close()
    if group.world_size < 3 and state["step"] == 39:
        time.sleep(0.02)
        state["step"] -= 1
if "ONEACCORD_NEWCOMER" in os.environ:
    while not os.path.exists("alone"):
        time.sleep(0.01)
"""
    program = TRAINING + waiting + "train()"
    answer = elastic(tmp_path, program, "-n", "1", "--max-ranks", "3")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    told = generations(answer.stdout)
    assert [fact["size"] for fact in told[0]] == [1]
    assert [fact["size"] for fact in told[max(told)]] == [3, 3, 3]
    assert answer.stderr == ""


def test_a_shrunken_world_is_filled_up_when_a_rank_comes_late(tmp_path: Path) -> None:
    waiting = """
def at_step(group, generation, state):
    if generation == 0 and rank == "1" and state["step"] == 5:
        os.kill(os.getpid(), 9)
    if group.world_size == 2:
        open("alone", "w").close()
    if generation and group.world_size <= 2:
        time.sleep(0.02)
        state["step"] -= 1
if "ONEACCORD_NEWCOMER" in os.environ:
    while not os.path.exists("alone"):
        time.sleep(0.01)
"""
    # So long do the others wait for the one that comes late.
    program = TRAINING.replace("timeout_s=30", 'timeout_s=30, config={"rendezvous": {"timeout_s": 5}}') + waiting + "train()"
    answer = elastic(tmp_path, program, "-n", "3", "--max-restarts", "1")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    sizes = {number: [fact["size"] for fact in facts] for number, facts in generations(answer.stdout).items()}
    assert sizes == {0: [3] * 3, 1: [2] * 2, 2: [3] * 3}


def test_before_the_first_generation_a_failure_ends_the_job(tmp_path: Path) -> None:
    program = (
        'import os\nif os.environ["RANK"] == "1":\n    raise ValueError("broken")\n' + TRAINING + "DEATHS = 0" + DYING + ENDING
    )
    answer = elastic(tmp_path, program, "-n", "2", "--max-restarts", "5", bearing={})  # nobody else has anything to say
    assert answer.returncode == 1
    assert "ValueError: broken" in answer.stderr
    assert "restart" not in answer.stderr


def test_without_restarts_the_launcher_says_how_the_job_would_have_gone_on(tmp_path: Path) -> None:
    program = TRAINING + "DEATHS = 1" + DYING + ENDING
    answer = elastic(tmp_path, program, "-n", "2", bearing={})
    assert answer.returncode == 128 + 9
    assert answer.stderr.splitlines()[-1] == (
        "oneaccord run: the program has an elastic function; with --max-restarts N, it goes on after a failure, and others come in the places of "
        "ranks that fail"
    )


def test_a_newcomer_that_cannot_start_is_replaced_in_its_turn(tmp_path: Path) -> None:
    broken = """
import os
if "ONEACCORD_NEWCOMER" in os.environ:
    try:
        os.close(os.open("tried", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        raise ImportError("not today")
"""
    answer = elastic(tmp_path, broken + TRAINING + "DEATHS = 1" + DYING + ENDING, "-n", "3", "--max-restarts", "2")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert {number: len(facts) for number, facts in generations(answer.stdout).items()} == {0: 3, 1: 3}
    assert "rank 0 failed (exit code 1), and another one comes in its place: restart 2 of 2" in answer.stderr


def test_who_was_cut_off_and_is_replaced_does_not_fail_the_job(tmp_path: Path) -> None:
    program = """
def at_step(group, generation, state):
    if rank == "1" and generation == 0 and state["step"] == 10:
        raise oa.PeerLostError("rank 0 cannot be reached", peer=0)
"""
    answer = elastic(tmp_path, TRAINING + program + ENDING, "-n", "3", "--max-restarts", "1")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert {number: len(facts) for number, facts in generations(answer.stdout).items()} == {0: 3, 1: 3}
    assert "1 rank failed, and all others ended well" in answer.stderr


def test_nobody_comes_in_the_place_of_ranks_that_made_different_calls(tmp_path: Path) -> None:
    program = """
def at_step(group, generation, state):
    if rank == "1" and state["step"] == 10:
        group.all_reduce(np.ones(7))
"""
    answer = elastic(tmp_path, TRAINING + program + ENDING, "-n", "3", "--max-restarts", "3")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "CollectiveMismatchError: the ranks did not make the same call" in answer.stderr
    assert "another one comes in its place" not in answer.stderr


def test_a_newcomer_that_is_configured_differently_is_told_so(tmp_path: Path) -> None:
    program = (
        'import os\nif "ONEACCORD_NEWCOMER" in os.environ:\n    os.environ["ONEACCORD_REPRODUCIBLE"] = "1"\n'
        + TRAINING
        + "DEATHS = 1"
        + DYING
        + ENDING
    )
    answer = elastic(tmp_path, program, "-n", "3", "--max-restarts", "1")
    assert answer.returncode == 0, answer.stdout + answer.stderr  # the others go on without it
    assert re.search("RendezvousError: rank [12] has choices", answer.stderr), answer.stderr
    assert {number: len(facts) for number, facts in generations(answer.stdout).items()} == {0: 3, 1: 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "2", "--min-ranks", "3"], "--min-ranks 3, then -n 2: each must be at least the one before"),
        (["-n", "2", "--min-ranks", "5", "--nnodes", "2"], "--min-ranks 5, then -n 2 on 2 hosts, 4 ranks in all: each"),
        (["-n", "2", "--max-ranks", "1"], "-n 2, then --max-ranks 1: each must be at least the one before"),
        (["-n", "2", "--min-ranks", "0"], "the first at least 1"),
        (["-n", "2", "--max-ranks", "5", "--nnodes", "2"], "spares are for one host; leave --max-ranks out"),
        (["-n", "2", "--max-restarts=-1"], "--max-restarts -1: give 0 or more"),
        (["-n", "2", "--max-restarts", "1", "--backend", "simulated"], "has no option --max-restarts"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["run", "--backend", "tcp", *options, __file__]))
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_small_campaign_learns_the_very_same_weights(tmp_path: Path) -> None:
    assert campaign_elastic.main(["--kills", "6", "--seed", "1", "--json", str(tmp_path / "kills.json")]) == 0
    told = json.loads((tmp_path / "kills.json").read_text())
    assert len(told["kills"]) == 6
    assert told["accuracy"] == told["undisturbed"]
