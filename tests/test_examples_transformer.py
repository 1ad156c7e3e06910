"""The transformer of the examples: its losses do not depend on the mesh, and a checkpoint of one mesh goes on with another."""

from __future__ import annotations

import numpy as np
import pytest

import manyhands_parallel as mp


@pytest.fixture
def train(repository, run_python, tmp_path):
    """Run the example in float64, on so many ranks of a backend; return the losses so far."""

    def run(world_size, backend, mesh, steps, folder, *options, script="train_transformer.py"):
        program = [repository / "examples" / script, *mesh, "--steps", str(steps), "--dtype", "float64", "--sample", "0"]
        launch = ["-m", "manyhands", "run", "-n", str(world_size), "--backend", backend] if world_size > 1 else []
        answer = run_python(*launch, *program, "--checkpoint", tmp_path / folder, *options)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert f"step {steps}/{steps}" in answer.stdout
        return np.array(mp.describe(mp.latest(tmp_path / folder)).extra)

    return run


THREE_AXES = ["--pp", "2", "--tp", "2"]


def test_the_transformer_has_the_losses_of_one_process_on_every_mesh_and_goes_on_with_another(train, tmp_path):
    alone = train(1, "", [], 4, "alone", "--plot", tmp_path / "losses.svg")
    assert "<svg" in (tmp_path / "losses.svg").read_text(encoding="utf-8")
    eight = train(8, "simulated", THREE_AXES, 2, "moved")
    four = train(4, "tcp", THREE_AXES, 4, "moved")
    assert len(alone) == 4
    assert alone[-1] < alone[0] - 0.5
    np.testing.assert_array_equal(four[:2], eight)  # it went on, and did not begin again
    np.testing.assert_allclose(four, alone, rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_transformer_learns_to_write(repository, run_python):
    answer = run_python(
        "-m", "manyhands", "run", "-n", "4", repository / "examples" / "train_transformer.py", *THREE_AXES, timeout_s=250
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.peers
def test_the_transformer_in_torch_has_the_losses_of_the_one_in_numpy_and_takes_over_its_checkpoint(train):
    alone = train(1, "", [], 4, "alone")
    train(2, "tcp", ["--tp", "2"], 2, "moved")
    moved = train(4, "tcp", THREE_AXES, 4, "moved", script="train_transformer_torch.py")
    np.testing.assert_allclose(moved, alone, rtol=0, atol=1e-12)
