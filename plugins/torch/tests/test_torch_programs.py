"""Programs of torch's on oneaccord: the results are Gloo's, failures are named, and a program ends well however it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers
HERE = Path(__file__).parent


def launch(program, *arguments, backend="shm", ranks=2):
    command = [sys.executable, "-m", "oneaccord", "run", "-n", str(ranks), HERE / program, *arguments]
    variables = {**os.environ, "ONEACCORD_BACKEND": backend}
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=55)


@pytest.fixture(scope="module")
def of_gloo(tmp_path_factory):
    """Where each rank's results over Gloo are."""
    folder = tmp_path_factory.mktemp("gloo")
    done = launch("features.py", "gloo", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("backend", ["shm", "tcp", "simulated"])
def test_all_that_torch_builds_on_a_process_group_gives_what_it_gives_over_gloo(backend, of_gloo):
    done = launch("features.py", "oneaccord", of_gloo, backend=backend)
    assert done.returncode == 0, done.stderr
    assert "DIFFERS" not in done.stdout
    assert done.stdout.count("compared 20") == 2


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("mismatch", "CollectiveMismatchError: the ranks did not make the same call"),
        ("kill", "PeerLostError: rank 1 was lost"),
        ("raise", "ValueError: planted"),
    ],
)
def test_what_goes_wrong_inside_a_backward_pass_is_named(case, said):
    done = launch("failures.py", case)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Segmentation fault" not in done.stderr


@pytest.mark.parametrize("case", ["no destroy", "pending", "futures", "dropped"])
def test_a_program_that_does_not_destroy_its_groups_ends_well(case):
    done = launch("failures.py", case)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_work_raises_our_error_and_its_futures_name_it():
    done = launch("failures.py", "works")
    assert sorted(set(done.stdout.replace("[0] ", "").replace("[1] ", "").splitlines())) == [
        "CollectiveMismatchError True",
        "RuntimeError True",
    ], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what listens")
def test_torch_and_its_store_listen_on_loopback_alone():
    done = launch("listening.py", backend="tcp")
    assert done.returncode == 0, done.stderr
    lines = [line.partition("listens at ")[2] for line in done.stdout.splitlines()]
    assert lines == ["0100007F"] * 6


def test_torchrun_starts_a_program():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", HERE / "calls.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=55)
    assert (done.returncode, done.stdout.count("all right")) == (0, 2), done.stderr


@pytest.mark.long
def test_torchrun_starts_all_ranks_of_an_elastic_program_again(tmp_path):
    program = """
import os
import numpy as np
import oneaccord as oa

@oa.elastic(state=lambda: {"step": 0}, timeout_s=20)
def train(group, generation, state):
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not is_first:
        print(f"again: generation {generation} step {state['step']} of {group.world_size}")
    while state["step"] < 20:
        if is_first and os.environ["RANK"] == "1" and state["step"] == 10:
            os.kill(os.getpid(), 9)
        group.barrier()
        state["step"] += 1
        state.commit()

train()
"""
    (tmp_path / "train.py").write_text(program)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        tmp_path / "train.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=55)
    assert (done.returncode, done.stdout.count("again: generation 0 step 0 of 2")) == (0, 2), done.stderr


def test_devices_may_have_several_backends():
    torch = pytest.importorskip("torch")
    if torch.__version__ < (2, 14):
        pytest.skip("torch 2.13 gives all devices of a group to one that is made in Python")
    done = launch("devices.py")
    assert (done.returncode, done.stdout.count("all right")) == (0, 2), done.stderr
