"""Two hosts, as two network namespaces joined by a cable; needs root and iproute2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.user_space_network import Network, can_make_networks

pytestmark = pytest.mark.skipif(not can_make_networks(), reason="making hosts needs root, iproute2 and /dev/net/tun")


@pytest.fixture
def pair() -> Iterator[Network]:
    with Network(2) as network:
        yield network


def start(pair: Network, host: int, script: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a host's two ranks of a job of four."""
    command = [sys.executable, "-m", "oneaccord", "run", "-n", "2", "--backend", "tcp", "--nnodes", "2"]
    command += ["--node-rank", str(host), "--rendezvous", f"{pair.address(0)}:29500", str(script)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")} | variables
    words = ["ip", "netns", "exec", Path(pair.namespace(host)).name, *command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)


def test_ranks_of_two_hosts_meet_and_talk(pair: Network, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        """
import numpy as np
import oneaccord as oa

with oa.init(timeout_s=30) as group:
    big = group.all_reduce(np.full(300_001, group.rank))
    print(group.rank, int(big[0]), group.all_gather(np.array([group.rank])).tolist(), flush=True)
"""
    )
    jobs = [
        start(pair, host, script, ONEACCORD_SECRET="the secret of the test", ONEACCORD_RUN_ID="of the test") for host in (0, 1)
    ]
    outputs = [job.communicate(timeout=50)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert sorted("".join(outputs).splitlines()) == [f"[{rank}] {rank} 6 [0, 1, 2, 3]" for rank in range(4)]


def test_without_a_secret_ranks_of_two_hosts_do_not_start(pair: Network, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("raise SystemExit('it ran')")
    job = start(pair, 0, script)
    output = job.communicate(timeout=50)[0]
    assert job.returncode == 2
    assert "ONEACCORD_SECRET" in output
    assert "it ran" not in output


@pytest.mark.long
def test_hosts_that_are_cut_apart_learn_that_they_are(pair: Network, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        """
import numpy as np
import oneaccord as oa

with oa.init(timeout_s=50) as group:
    x = np.zeros(1000)
    group.all_reduce(x)
    print("all here", flush=True)
    try:
        while True:
            group.all_reduce(x, out=x)
    except oa.PeerLostError as error:
        print("lost", error.peer, flush=True)
"""
    )
    jobs = [
        start(pair, host, script, ONEACCORD_SECRET="the secret of the test", ONEACCORD_RUN_ID="of the test") for host in (0, 1)
    ]
    for job in jobs:
        assert job.stdout is not None
        assert [job.stdout.readline()[4:] for _ in range(2)] == ["all here\n"] * 2
    with pair.cut([0], [1]):
        near, far = (job.communicate(timeout=50)[0] for job in jobs)
    # Each side can only name ranks of the other one.
    assert {line[4:] for line in near.splitlines()} <= {"lost 2", "lost 3"}, near
    assert {line[4:] for line in far.splitlines()} == {"lost 0"}, far
