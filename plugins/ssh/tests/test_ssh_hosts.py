"""``oneaccord run --on ssh`` with real ssh servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.on_hosts import ADDS, ELASTIC, LOOPS, Runner, await_gone, holders

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]


@pytest.fixture
def on_ssh(servers: Any, tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(
        tmp_path, ["--on", "ssh", "--option", f"config_file={servers.config}", "--hosts", "host1:2,host2:2", "-n", "4"]
    )
    yield runner
    runner.close()


def test_ssh_results_and_output(on_ssh: Runner) -> None:
    code, out, err = on_ssh.run(ADDS, "two words", words=["-n", "3"])
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[0] rank 0 of 3 is 0 on 0: 6 ['two words']",
        "[1] rank 1 of 3 is 1 on 0: 6 ['two words']",
        "[2] rank 2 of 3 is 0 on 1: 6 ['two words']",
    ]


def test_ssh_killed_rank_is_named_once_with_its_host(on_ssh: Runner) -> None:
    job = on_ssh.start(LOOPS)
    pids = job.ranks(4)
    os.kill(pids[3], signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 137
    assert err.count("failed first") == 1
    assert "rank 3 failed first: killed by SIGKILL on host2" in err
    await_gone(pids)


def test_ssh_exception_and_exit_code(on_ssh: Runner) -> None:
    job = on_ssh.start(LOOPS)
    job.ranks(4)
    job.fail()
    code, _, err = job.finish()
    assert (code, "rank 1 failed first: exit code 1 on host1" in err) == (1, True)
    assert err.endswith("ValueError: asked to fail\n")


def test_ssh_interrupt_ends_all_ranks(on_ssh: Runner) -> None:
    job = on_ssh.start(LOOPS)
    pids = job.ranks(4)
    os.kill(job.pid, signal.SIGINT)
    code, _, err = job.finish()
    assert (code, "ended by SIGINT, when the ranks were here" in err) == (130, True)
    await_gone(pids)


def test_ssh_killed_driver_leaves_nothing(on_ssh: Runner) -> None:
    job = on_ssh.start(LOOPS)
    pids = [*job.ranks(4), *job.children()]
    os.kill(job.pid, signal.SIGKILL)
    job.finish()
    await_gone(pids)


def test_ssh_killed_client_ends_all_and_is_named(on_ssh: Runner) -> None:
    job = on_ssh.start(LOOPS)
    pids = job.ranks(4)
    os.kill(job.children()[1], signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 137
    assert "its host host2 was lost: ssh ended (killed by SIGKILL)" in err
    await_gone(pids)


def test_ssh_secret_is_with_the_ranks_alone(on_ssh: Runner) -> None:
    job = on_ssh.start(LOOPS)
    pids = job.ranks(4)
    assert holders(job.secret()) <= set(pids)
    job.stop()
    assert job.finish()[0] == 0


def test_ssh_two_jobs_at_once(on_ssh: Runner) -> None:
    jobs = [on_ssh.start(LOOPS, name=name) for name in ("one", "two")]
    for job in jobs:
        job.ranks(4)
        job.stop()
    assert [job.finish()[0] for job in jobs] == [0, 0]


def test_ssh_killed_rank_is_replaced(on_ssh: Runner) -> None:
    code, out, err = on_ssh.run(ELASTIC, words=["--max-restarts", "1"])
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] 1 4" for rank in range(4)]


def test_ssh_host_that_cannot_be_reached_is_named(on_ssh: Runner) -> None:
    code, _, err = on_ssh.run(ADDS, words=["--hosts", "host1:2,nowhere.invalid:2"])
    assert code == 2
    assert "error: host nowhere.invalid cannot be reached" in err
    assert "Could not resolve hostname nowhere.invalid" in err


def test_ssh_key_that_is_refused_asks_for_no_password(on_ssh: Runner, servers: Any) -> None:
    other = servers.folder / "host_key"  # a key, but not the one that is allowed
    config = on_ssh.folder / "config"
    config.write_text(Path(servers.config).read_text().replace(f"{servers.folder}/id", str(other)))
    code, _, err = on_ssh.run(ADDS, words=["--option", f"config_file={config}"])
    assert code == 2
    assert "host host1 cannot be reached" in err or "host host2 cannot be reached" in err
    assert "Permission denied" in err


def test_ssh_python_that_is_not_there_is_told(on_ssh: Runner) -> None:
    code, _, err = on_ssh.run(ADDS, words=["--option", "python=/no/python3"])
    assert (code, "/no/python3" in err, "cannot be reached, or has no oneaccord" in err) == (2, True, True)
