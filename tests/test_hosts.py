"""Two hosts, as two network namespaces joined by a cable; needs root and iproute2."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def _ip(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *arguments], capture_output=True, check=True)


def _can_make_hosts() -> bool:
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"mh-{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


pytestmark = pytest.mark.skipif(not _can_make_hosts(), reason="making network namespaces needs root and iproute2")

ADDRESSES = ("10.77.0.1", "10.77.0.2")
Host = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two hosts that reach each other at `ADDRESSES`."""
    names = (f"mh-{os.getpid()}-a", f"mh-{os.getpid()}-b")
    cables = (f"mha{os.getpid()}", f"mhb{os.getpid()}")
    for name in names:
        _ip("netns", "add", name)
    try:
        _ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", cable, "up")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)


def start(host: str, node_rank: int, script: Path, **variables: str) -> "subprocess.Popen[str]":
    """Start this host's two ranks of a job of four."""
    command = [sys.executable, "-m", "manyhands", "run", "-n", "2", "--backend", "tcp", "--nnodes", "2"]
    command += ["--node-rank", str(node_rank), "--rendezvous", f"{ADDRESSES[0]}:29500", str(script)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MANYHANDS_")} | variables
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    )


def test_ranks_of_two_hosts_meet_and_talk(hosts: tuple[str, str], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        """
import numpy as np
import manyhands as mh

with mh.init(timeout_s=30) as group:
    big = group.all_reduce(np.full(300_001, group.rank))
    print(group.rank, int(big[0]), group.all_gather(np.array([group.rank])).tolist(), flush=True)
"""
    )
    jobs = [start(host, number, script, MANYHANDS_SECRET="of the test") for number, host in enumerate(hosts)]
    outputs = [job.communicate(timeout=50)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert sorted("".join(outputs).splitlines()) == [f"[{rank}] {rank} 6 [0, 1, 2, 3]" for rank in range(4)]


def test_without_a_secret_ranks_of_two_hosts_do_not_start(hosts: tuple[str, str], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("raise SystemExit('it ran')")
    job = start(hosts[0], 0, script)
    output = job.communicate(timeout=50)[0]
    assert job.returncode == 2
    assert "MANYHANDS_SECRET" in output
    assert "it ran" not in output


@pytest.mark.long
def test_hosts_that_are_cut_apart_learn_that_they_are(hosts: tuple[str, str], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        """
import numpy as np
import manyhands as mh

with mh.init(timeout_s=50) as group:
    x = np.zeros(1000)
    group.all_reduce(x)
    print("all here", flush=True)
    try:
        while True:
            group.all_reduce(x, out=x)
    except mh.PeerLostError as error:
        print("lost", error.peer, flush=True)
"""
    )
    jobs = [start(host, number, script, MANYHANDS_SECRET="of the test") for number, host in enumerate(hosts)]
    for job in jobs:
        assert job.stdout is not None
        assert [job.stdout.readline()[4:] for _ in range(2)] == ["all here\n"] * 2
    _ip("-n", hosts[0], "link", "set", f"mha{os.getpid()}", "down")
    near, far = (job.communicate(timeout=50)[0] for job in jobs)
    # Each side can only name ranks of the other one.
    assert {line[4:] for line in near.splitlines()} <= {"lost 2", "lost 3"}, near
    assert {line[4:] for line in far.splitlines()} == {"lost 0"}, far
