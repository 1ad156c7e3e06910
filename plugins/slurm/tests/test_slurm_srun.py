"""Programs that srun starts: they meet, each step alone, and learn what happens to the others."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]

SUM = """
import os, numpy as np, oneaccord as oa
with oa.init(timeout_s=60) as group:
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    steps = group.broadcast_object([step])
    total = group.all_reduce(np.array([group.rank]))[0]
    print(group.rank, group.world_size, total, steps == [step], os.environ["SLURMD_NODENAME"])
"""


@pytest.fixture
def cluster(slurm: Any) -> Iterator[Any]:
    yield slurm
    slurm.until_empty()


def ranks(output: str) -> list[list[str]]:
    """Return what the ranks printed, in order."""
    return sorted((line.split() for line in output.splitlines()), key=lambda words: int(words[0]))


def assert_met(output: str, size: int) -> list[str]:
    """Check what ranks of one step printed; return their nodes."""
    found = ranks(output)
    total = str(size * (size - 1) // 2)
    assert [words[:4] for words in found] == [[str(rank), str(size), total, "True"] for rank in range(size)], output
    return [words[4] for words in found]


def test_ranks_of_two_nodes_meet(cluster: Any) -> None:
    done = cluster.run("srun", "-N2", "-n4", sys.executable, "-c", SUM)
    assert done.returncode == 0, done
    assert len(set(assert_met(done.stdout, 4))) == 2


def test_tasks_ordered_by_a_file_meet(cluster: Any) -> None:
    first, second = cluster.nodes[2], cluster.nodes[0]
    hosts = cluster.folder / "hostfile"
    hosts.write_text(f"{first}\n{second}\n{first}\n")
    done = cluster.run("srun", "-n3", "-m", "arbitrary", sys.executable, "-c", SUM, SLURM_HOSTFILE=str(hosts))
    assert done.returncode == 0, done
    assert assert_met(done.stdout, 3) == [first, second, first]


@pytest.mark.parametrize("layout", [["-r", "2", "-N2", "-n2"], ["-m", "plane=1", "-N2", "-n4"]])
def test_other_layouts_meet(cluster: Any, layout: list[str]) -> None:
    done = cluster.run("salloc", "-Q", "-N4", "-n8", "srun", *layout, sys.executable, "-c", SUM)
    assert done.returncode == 0, done
    assert_met(done.stdout, int(layout[-1][2:]))


def test_steps_and_jobs_at_once_each_meet_alone(cluster: Any) -> None:
    steps = f'for i in 1 2; do srun --overlap -N2 -n4 --output=step-$i.txt "{sys.executable}" -c "$PROGRAM" & done; wait'
    both = cluster.start("salloc", "-Q", "-N2", "-n4", "sh", "-c", steps, PROGRAM=SUM)
    other = cluster.run("srun", "-N2", "-n4", sys.executable, "-c", SUM)
    assert both.wait(90) == 0, both.communicate()
    both.communicate()
    assert_met(other.stdout, 4)
    for number in (1, 2):
        assert_met((cluster.folder / f"step-{number}.txt").read_text(), 4)


DIES = """
import os, signal, sys, numpy as np, oneaccord as oa
with oa.init(timeout_s=60) as group:
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except oa.PeerLostError as error:
        print(group.rank, error.peer)
        sys.exit(3)
"""


def test_a_killed_rank_is_named_by_the_others(cluster: Any) -> None:
    done = cluster.run("srun", "-N2", "-n4", "--kill-on-bad-exit=0", sys.executable, "-c", DIES)
    assert ranks(done.stdout) == [["0", "2"], ["1", "2"], ["3", "2"]], done
    assert done.returncode == 128 + 9


WAITS = """
import oneaccord as oa
with oa.init(timeout_s=60) as group:
    group.barrier()
    print("here", flush=True)
    if group.rank == 0:
        input()
    group.barrier()
"""


def test_scancel_ends_all_ranks(cluster: Any) -> None:
    running = cluster.start("srun", "-N2", "-n2", sys.executable, "-c", WAITS)
    assert [running.stdout.readline() for _ in range(2)] == ["here\n"] * 2
    (job,) = cluster.jobs()
    assert cluster.run("scancel", job).returncode == 0
    assert running.wait(45) != 0
    running.communicate()


def test_another_step_is_refused_in_words_that_name_both(cluster: Any) -> None:
    """Both are told to meet at one place, as a script might."""
    node = cluster.nodes[0]
    lines = [
        f'srun --overlap -N1 -n2 -w {node} --output=a.txt "{sys.executable}" -c "$PROGRAM" &',
        "until grep -q listens a.txt; do sleep 0.1; done",
        f'srun --overlap -N1 -n2 -w {node} --output=b.txt "{sys.executable}" -c "$PROGRAM"; wait',
    ]
    program = """
import os, sys, oneaccord as oa
if os.environ["SLURM_STEP_ID"] == "0" and os.environ["SLURM_PROCID"] == "1":
    import time
    print("listens", flush=True)
    while not os.path.exists("refused"):
        time.sleep(0.1)
try:
    with oa.init(timeout_s=60) as group:
        print("met", group.world_size, flush=True)
except oa.RendezvousError as error:
    print(error, flush=True)
    open("refused", "w").close()
"""
    with socket.create_server((node, 0)) as free:
        place = f"{node}:{free.getsockname()[1]}"
    done = cluster.run("salloc", "-Q", "-N1", "-n2", "sh", "-c", "\n".join(lines), PROGRAM=program, ONEACCORD_RENDEZVOUS=place)
    assert done.returncode == 0, done
    assert (cluster.folder / "a.txt").read_text().splitlines().count("met 2") == 2
    refused = (cluster.folder / "b.txt").read_text()
    assert ".1', but the job 'slurm tests:" in refused
    assert f".0' meets at {place}" in refused
    assert "the port is in use" in refused


AGAIN = """
import os, sys, time, oneaccord as oa
with oa.init(timeout_s=60) as group:
    group.barrier()
    if "SLURM_RESTART_COUNT" not in os.environ:
        print(group.rank, "began", flush=True)
        time.sleep(600)
    print(group.rank, "again", group._job.meeting.credentials.run, flush=True)
"""


def test_a_requeued_job_meets_under_another_name(cluster: Any) -> None:
    output = cluster.folder / "again.txt"
    output.touch()
    (cluster.folder / "again.sh").write_text(f'#!/bin/sh\nsrun "{sys.executable}" -c "$PROGRAM"\n')
    words = ["--parsable", "--requeue", "--open-mode=append", f"--output={output}", "-N2", "-n2", "again.sh"]
    job = cluster.run("sbatch", *words, PROGRAM=AGAIN).stdout.strip()
    until(lambda: output.read_text().count("began") == 2, output)
    assert cluster.run("scontrol", "requeue", job).returncode == 0
    until(lambda: output.read_text().count("again slurm tests:") == 2, output)
    found = [line.split()[-1] for line in output.read_text().splitlines() if " again " in line]
    assert found == [f"tests:{job}.0.1"] * 2


def until(is_so: Callable[[], bool], output: Path) -> None:
    limit = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < limit, output.read_text()
        time.sleep(0.1)
