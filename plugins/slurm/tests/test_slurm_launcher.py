"""The launcher of Slurm on a real one: hosts, commands, and an allocation that ends with its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oneaccord.api import Ask, ConfigError, Deadline, DeadlineError
from oneaccord_slurm.config import SlurmConfig
from oneaccord_slurm.plugin import register_launchers
from oneaccord_slurm.slurm import SlurmLauncher

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]


@pytest.fixture
def cluster(slurm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let this process be on a host of the cluster, outside any allocation."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
    yield slurm
    slurm.until_empty()


def shown(cluster: Any, ask: str, *salloc: str) -> list[str]:
    """Return the hosts that the launcher finds within an allocation, or the error, as lines."""
    program = f"""
from oneaccord.api import Ask, Deadline, OneAccordError
from oneaccord_slurm.config import SlurmConfig
from oneaccord_slurm.slurm import SlurmLauncher
launcher = SlurmLauncher(SlurmConfig())
try:
    for host in launcher.allocate(Ask({ask}), Deadline(60)):
        print(host.name, host.address, host.slots, host.gpus)
except OneAccordError as error:
    print(type(error).__name__, error)
"""
    done = cluster.run("salloc", "-Q", *salloc, sys.executable, "-c", program)
    assert done.returncode == 0, done
    cluster.until_empty()  # the next allocation gets the same nodes
    return done.stdout.splitlines()


def test_hosts_within_an_allocation_have_its_tasks(cluster: Any) -> None:
    (spec,) = [each for each in register_launchers() if each.name == "slurm"]
    assert spec.probe() is None
    one, other = cluster.nodes[:2]
    assert shown(cluster, "4", "-N2", "-n4", "--ntasks-per-node=2") == [f"{one} {one} 2 0", f"{other} {other} 2 0"]
    assert shown(cluster, "2, per_host=1", "-N2", "--exclusive") == [f"{one} {one} 4 0", f"{other} {other} 4 0"]


def test_an_allocation_that_is_too_small_is_told(cluster: Any) -> None:
    (line,) = shown(cluster, "4", "-N2", "-n3")
    assert line.startswith("UsageError the allocation ")
    assert "3 slots in all: too few for 4 ranks" in line
    (line,) = shown(cluster, "4, per_host=1", "-N2", "-n4")
    assert "1 on each: too few for 4 ranks" in line
    (line,) = shown(cluster, "2, gpus=1", "-N2", "-n2")
    assert "has 0 GPUs on" in line


@pytest.mark.parametrize("submit", ["salloc", "sbatch"])
def test_an_allocation_is_made_used_and_given_back(cluster: Any, submit: str) -> None:
    launcher = SlurmLauncher(SlurmConfig(submit=submit, partition="main", time="5", args=("--comment=of the test",)))
    hosts = launcher.allocate(Ask(4, per_host=2), Deadline(60))
    assert [(host.name, host.slots) for host in hosts] == [(node, 2) for node in cluster.nodes[:2]]
    assert cluster.run("squeue", "-h", "-o", "%k|%P|%l|%D").stdout == "of the test|main|5:00|2\n"
    program = "import os, sys; print(os.environ['SLURMD_NODENAME'], sys.stdin.read(), os.getcwd()); sys.exit(7)"
    for host in hosts:
        done = subprocess.run(
            launcher.command(host, [host.python, "-c", program]),
            input="a line\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (7, f"{host.name} a line\n {Path.cwd()}\n"), done
    launcher.release()
    launcher.release()
    cluster.until_empty()


@pytest.mark.parametrize("submit", ["salloc", "sbatch"])
def test_what_slurm_refuses_is_told_in_its_words(cluster: Any, submit: str) -> None:
    launcher = SlurmLauncher(SlurmConfig(submit=submit, partition="none of them"))
    with pytest.raises(ConfigError, match=rf"(?s)^{submit} .*'--partition=none of them' failed: .*[Ii]nvalid partition name"):
        launcher.allocate(Ask(2), Deadline(60))


@pytest.mark.parametrize("submit", ["salloc", "sbatch"])
def test_an_allocation_that_does_not_come_is_waited_for_no_longer(cluster: Any, submit: str) -> None:
    busy = cluster.start("salloc", "-Q", "-N4", "--exclusive", "cat")
    limit = time.monotonic() + 45
    while not cluster.jobs():
        assert time.monotonic() < limit
        time.sleep(0.1)
    launcher = SlurmLauncher(SlurmConfig(submit=submit))
    with pytest.raises(DeadlineError, match=rf"^{submit} .* was not granted within 1 s"):
        launcher.allocate(Ask(2), Deadline(1))
    limit = time.monotonic() + 45
    while len(cluster.jobs()) > 1:
        assert time.monotonic() < limit, cluster.jobs()
        time.sleep(0.1)
    busy.stdin.close()
    assert busy.wait(45) == 0
    busy.stdin = None
    busy.communicate()


DRIVER = """
import subprocess, sys
from oneaccord.api import Ask, Deadline
from oneaccord_slurm.config import SlurmConfig
from oneaccord_slurm.slurm import SlurmLauncher
launcher = SlurmLauncher(SlurmConfig(submit=sys.argv[1]))
hosts = launcher.allocate(Ask(2, per_host=1), Deadline(60))
agent = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
for host in hosts:
    subprocess.Popen(launcher.command(host, [host.python, "-c", agent]), stdin=subprocess.PIPE, start_new_session=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("submit", ["salloc", "sbatch"])
def test_a_killed_driver_leaves_no_process_and_no_job(cluster: Any, submit: str) -> None:
    driver = cluster.start(sys.executable, "-c", DRIVER, submit)
    agents = [int(driver.stdout.readline()) for _ in range(2)]
    assert len(cluster.jobs()) == 1
    driver.send_signal(signal.SIGKILL)
    limit = time.monotonic() + 45
    while any(map(is_there, agents)):
        assert time.monotonic() < limit
        time.sleep(0.05)
    cluster.until_empty()
    driver.communicate()


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_job_that_is_cancelled_ends_its_commands(cluster: Any) -> None:
    launcher = SlurmLauncher(SlurmConfig())
    (host,) = launcher.allocate(Ask(1), Deadline(60))
    command = launcher.command(host, [host.python, "-c", "print('here', flush=True); import time; time.sleep(600)"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "here\n"
        (job,) = cluster.jobs()
        cluster.run("scancel", job)
        assert running.wait(45) != 0
    launcher.release()


def test_commands_of_one_allocation_run_at_once_on_one_host(cluster: Any) -> None:
    launcher = SlurmLauncher(SlurmConfig())
    (host,) = launcher.allocate(Ask(1), Deadline(60))
    command = launcher.command(host, ["sh", "-c", "echo here; cat"])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        assert [each.stdout and each.stdout.readline() for each in (one, other)] == ["here\n"] * 2
    assert (one.returncode, other.returncode) == (0, 0)
    launcher.release()


def test_a_config_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="submit"):
        SlurmConfig(submit="qsub")
