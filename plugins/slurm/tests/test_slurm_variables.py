"""The launchers by their variables alone: what they understand, with commands that are not Slurm's nor PBS's."""

from __future__ import annotations

import os
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

import oneaccord as oa
from oneaccord.api import Ask, ConfigError, Deadline, DeadlineError, HostLauncher, LauncherSpec, UsageError
from oneaccord_slurm.plugin import register_launchers

SPECS = {each.name: each for each in register_launchers()}
TIMEOUT = Deadline(1e5)


def make(name: str, **options: object) -> HostLauncher:
    """Return a launcher as its description says."""
    factory, config = (
        getattr(import_module(module), word)
        for module, _, word in (text.partition(":") for text in (SPECS[name].factory, SPECS[name].config))
    )
    launcher: HostLauncher = factory(config(**options))
    return launcher


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the PATH whose ``scontrol`` knows two nodes."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "PBS"))]:
        monkeypatch.delenv(name)
    script = """case "$1 $2" in
    "show hostnames") echo n1; echo n2 ;;
    "show node") echo "NodeName=n1 Arch=x NodeAddr=10.0.0.1 NodeHostName=n1"; echo "NodeName=n2 Arch=x NodeAddr=10.0.0.2 N=1" ;;
    "show config") echo "TaskPlugin              = task/affinity,task/cgroup" ;;
    *) exit 1 ;;
esac"""
    put(tmp_path, "scontrol", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def within(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "JOB_CPUS_PER_NODE": "8(x2)", **variables}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.parametrize(
    ("variables", "slots", "gpus"),
    [
        pytest.param({}, [8, 8], 0, id="processors"),
        pytest.param({"NTASKS": "7", "TASKS_PER_NODE": "4,3"}, [4, 3], 0, id="tasks"),
        pytest.param({"TASKS_PER_NODE": "1(x2)"}, [8, 8], 0, id="tasks that nobody asked for"),
        pytest.param({"NTASKS": "1", "TASKS_PER_NODE": "1"}, [8, 8], 0, id="tasks of a step within"),
        pytest.param({"GPUS_ON_NODE": "4"}, [8, 8], 4, id="GPUs"),
        pytest.param({"GPUS_PER_NODE": "a100:2"}, [8, 8], 2, id="GPUs of a kind"),
    ],
)
def test_an_allocation_is_understood(
    commands: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], slots: list[int], gpus: int
) -> None:
    within(monkeypatch, **variables)
    hosts = make("slurm", python="/opt/python", folder="/work").allocate(Ask(2), TIMEOUT)
    assert [host.name for host in hosts] == ["n1", "n2"]
    assert [host.address for host in hosts] == ["10.0.0.1", "10.0.0.2"]
    assert [host.slots for host in hosts] == slots
    assert {(host.gpus, host.python, host.folder) for host in hosts} == {(gpus, "/opt/python", "/work")}


def test_a_command_is_a_step_that_shares_the_allocation(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, NTASKS_PER_NODE="4", CPUS_PER_TASK="2")
    put(commands, "srun", 'echo "$@"; env | grep -c "SLURM_NTASKS_PER_NODE\\|SLURM_CPUS_PER_TASK"')
    launcher = make("slurm", srun_args=("--mem=0",))
    host = launcher.allocate(Ask(2), TIMEOUT)[1]
    done = subprocess.run(launcher.command(host, ["python3", "-m", "x"]), capture_output=True, text=True, check=False)
    words, count = done.stdout.splitlines()
    assert words.startswith("--jobid=7 --overlap --nodes=1 --ntasks=1 --nodelist=n2 --cpu-bind=none ")
    assert words.endswith(" --mem=0 python3 -m x")
    assert count == "0"


def test_gpus_that_do_not_suffice_are_told(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, GPUS_ON_NODE="4")
    assert len(make("slurm").allocate(Ask(8, per_host=4, gpus=1), TIMEOUT)) == 2
    with pytest.raises(UsageError, match="has 4 GPUs on n1, and 4 ranks with 2 each need 8"):
        make("slurm").allocate(Ask(8, per_host=4, gpus=2), TIMEOUT)


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        (
            "echo 'slurm_load_node error: no connection' >&2; exit 1",
            ConfigError,
            "failed: slurm_load_node error: no connection",
        ),
        ("echo n1", ConfigError, "'n\\[1-2\\]' with '8\\(x2\\)' tasks or processors, which do not fit"),
        ("exec sleep 60", DeadlineError, "did not answer within 0.3 s"),
    ],
)
def test_a_scontrol_that_fails_is_told(
    commands: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: type[Exception], words: str
) -> None:
    within(monkeypatch)
    put(commands, "scontrol", script)
    with pytest.raises(error, match=words):
        make("slurm").allocate(Ask(2), Deadline(0.3) if error is DeadlineError else TIMEOUT)


def test_without_slurm_the_probe_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no srun on the PATH" in (SPECS["slurm"].probe() or "")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match=r"^salloc .* cannot be run .*: is Slurm installed on this host\?"):
        make("slurm").allocate(Ask(2), TIMEOUT)


@pytest.fixture
def pbs(commands: Path, monkeypatch: pytest.MonkeyPatch) -> LauncherSpec:
    """Let this process be in a job of PBS with three slots on each of two hosts."""
    (commands / "nodes").write_text("h1\nh1\nh1\nh2\nh2\nh2\n")
    monkeypatch.setenv("PBS_NODEFILE", str(commands / "nodes"))
    monkeypatch.setenv("PBS_JOBID", "12.server")
    put(commands, "pbs_tmrsh", 'echo "on $1"; shift; exec "$@"')
    return SPECS["pbs"]


def test_pbs_hosts_have_a_slot_for_each_line(pbs: LauncherSpec) -> None:
    assert pbs.probe() is None
    hosts = make("pbs", gpus_per_host=2).allocate(Ask(6), TIMEOUT)
    assert [(host.name, host.address, host.slots, host.gpus) for host in hosts] == [("h1", "h1", 3, 2), ("h2", "h2", 3, 2)]
    with pytest.raises(
        UsageError, match=r"the job 12\.server has 2 hosts \(h1: 3, h2: 3\), 6 slots in all: too few for 7 ranks"
    ):
        make("pbs").allocate(Ask(7), TIMEOUT)


def test_pbs_runs_a_program_on_a_host(pbs: LauncherSpec) -> None:
    launcher = make("pbs")
    host = launcher.allocate(Ask(2), TIMEOUT)[1]
    done = subprocess.run(launcher.command(host, ["cat"]), input="words", capture_output=True, text=True, check=False)
    assert done.stdout == "on h2\nwords"
    assert make("pbs", remote=("ssh", "-q")).command(host, ["cat"]) == ["ssh", "-q", "h2", "cat"]
    launcher.release()


@pytest.mark.parametrize("nodes", [None, "missing", "empty"])
def test_pbs_outside_a_job_is_told(
    pbs: LauncherSpec, commands: Path, monkeypatch: pytest.MonkeyPatch, nodes: str | None
) -> None:
    (commands / "empty").touch()
    if nodes is None:
        monkeypatch.delenv("PBS_NODEFILE")
        assert "PBS_NODEFILE is not set" in (pbs.probe() or "")
    else:
        monkeypatch.setenv("PBS_NODEFILE", str(commands / nodes))
    with pytest.raises(ConfigError, match=r"PBS_NODEFILE.*job of PBS"):
        make("pbs").allocate(Ask(2), TIMEOUT)


def test_slurm_without_its_controller_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands are there, and nothing is to be installed."""
    for name, words in (("srun", ""), ("scontrol", "echo 'Slurmctld(primary) at n1 is DOWN'; exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(oa.BackendUnavailableError, match=r"does not answer \(Slurmctld\(primary\) at n1 is DOWN\)") as caught:
        oa.launch(print, 2, on="slurm")
    assert "pip install" not in str(caught.value)
