"""A Slurm of four nodes on this host, in a folder of its own, for the tests that need one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
_READY_S = 60.0
# A job that is requeued begins again once the credentials of its steps have expired: two minutes, if nothing else is said.
_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
InactiveLimit=0
KillWait=2
"""


class Cluster:
    """A running Slurm.

    Attributes
    ----------
    environ
        The variables with which its commands find it.
    nodes
        The names of its nodes, which are addresses.
    folder
        Where its ranks write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = [f"127.0.0.{number}" for number in (11, 12, 13, 14)]
        dropped = ("SLURM", "PMI", "OMPI", "ONEACCORD", "RANK", "WORLD_SIZE", "MASTER")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        self.environ = {
            **clean,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "ONEACCORD_SECRET": "5e" * 32,
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, *words: str, timeout_s: float = 90, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        environ = {**self.environ, **variables}
        return subprocess.run(
            words, env=environ, cwd=self.folder, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command with pipes, in a session of its own."""
        return subprocess.Popen(
            words,
            env={**self.environ, **variables},
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def jobs(self) -> list[str]:
        """Return the numbers of the jobs in the queue."""
        return self.run("squeue", "--noheader", "--format=%i").stdout.split()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        limit = time.monotonic() + 45
        while not is_so():
            assert time.monotonic() < limit, f"it did not happen; jobs: {self.jobs()}"
            time.sleep(0.1)

    def until_empty(self) -> None:
        """Wait until there are no jobs."""
        limit = time.monotonic() + 45
        while jobs := self.jobs():
            assert time.monotonic() < limit, f"jobs {jobs} do not end"
            time.sleep(0.1)


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else None


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a Slurm; skip the test where there can be none."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    cluster = Cluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _set_up(cluster, daemons)
        yield cluster
    finally:
        cluster.run("scancel", "--full", "--state=RUNNING", "--user=root")
        cluster.run("scancel", "--state=PENDING", "--user=root")
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _set_up(cluster: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    folder, host = cluster.folder, socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    controller, *ports = _free_ports(1 + len(cluster.nodes))
    lines = [_CONF.format(folder=folder, host=host, controller=controller)]
    for node, port in zip(cluster.nodes, ports, strict=True):
        (folder / "spool" / node).mkdir(parents=True)
        lines.append(f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs=4 State=UNKNOWN")
    lines.append(f"PartitionName=main Nodes={','.join(cluster.nodes)} Default=YES MaxTime=INFINITE State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    # Slurm 22.05 knows no "disabled"; version 1 does nothing where no plugin of cgroups is asked for.
    version = 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v{version}\n")
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    munge = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "socket", "log-file", "seed-file")]
    commands = [["munged", "--force", "--foreground", f"--pid-file={folder}/munge.pid", *munge], ["slurmctld", "-D", "-i"]]
    commands += [["slurmd", "-D", "-N", node] for node in cluster.nodes]
    with (folder / "daemons.log").open("wb") as log:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=cluster.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            if command[0] == "munged":
                _await((folder / "munge.socket").exists, daemons, folder)
        _await(
            lambda: cluster.run("sinfo", "-h", "--responding", "-t", "idle", "-o", "%D").stdout.strip() == "4", daemons, folder
        )


def _await(is_ready, daemons: list[subprocess.Popen[bytes]], folder: Path) -> None:  # type: ignore[no-untyped-def]
    limit = time.monotonic() + _READY_S
    while not is_ready():
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        assert not ended, f"{ended} ended: {(folder / 'daemons.log').read_text()[-2000:]}"
        assert time.monotonic() < limit, (folder / "daemons.log").read_text()[-2000:]
        time.sleep(0.1)
