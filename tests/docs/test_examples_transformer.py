"""The transformer of the examples: its losses do not depend on the mesh, and a checkpoint of one mesh goes on with another."""

from __future__ import annotations

import numpy as np
import pytest

import oneaccord_parallel as mp

SMALLER = {
    "VOCABULARY, CONTEXT = len(CHARACTERS), 64": "VOCABULARY, CONTEXT = len(CHARACTERS), 8",
    "LAYERS, HEADS, WIDTH = 4, 4, 64": "LAYERS, HEADS, WIDTH = 2, 2, 8",
    "BATCH, MICROBATCHES = 32, 4": "BATCH, MICROBATCHES = 8, 4",
    "for name in sorted(topics))": "for name in sorted(topics)[:5])",
}
"""What makes the model of the example so small, and its text so short, that they cost nothing."""


@pytest.fixture
def train(repository, run_python, tmp_path):
    """Run the example in float64 and small, on so many ranks of a backend; return the losses so far."""
    for name in ("train_transformer.py", "train_transformer_torch.py"):
        source = (repository / "examples" / name).read_text(encoding="utf-8")
        for line, smaller in SMALLER.items():
            assert (line in source) == (name == "train_transformer.py")
            source = source.replace(line, smaller)
        (tmp_path / name).write_text(source, encoding="utf-8")

    def run(world_size, backend, mesh, steps, folder, *options, script="train_transformer.py"):
        launch = ["run", "-n", str(world_size), *(["--backend", backend] if backend else [])]
        words = [script, *mesh, "--steps", str(steps), "--dtype", "float64", "--sample", "0", "--checkpoint", folder, *options]
        answer = run_python("-m", "oneaccord", *launch, *words)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert f"step {steps}/{steps}" in answer.stdout
        return np.array(mp.describe(mp.latest(tmp_path / folder)).extra)

    return run


THREE_AXES = ["--pp", "2", "--tp", "2"]


@pytest.mark.timeout(150)  # three programs
def test_the_transformer_has_the_losses_of_one_process_on_every_mesh_and_goes_on_with_another(train, tmp_path):
    alone = train(1, "", [], 4, "alone", "--plot", "losses.svg")
    assert "<svg" in (tmp_path / "losses.svg").read_text(encoding="utf-8")
    first = train(4, "simulated", ["--pp", "2"], 2, "moved")
    four = train(4, "tcp", THREE_AXES, 4, "moved")
    assert len(alone) == 4
    assert len(set(alone.tolist())) == 4
    np.testing.assert_array_equal(four[:2], first)  # it went on, and did not begin again
    np.testing.assert_allclose(four, alone, rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_transformer_learns_to_write(repository, run_python):
    answer = run_python(
        "-m", "oneaccord", "run", "-n", "4", repository / "examples" / "train_transformer.py", *THREE_AXES, timeout_s=250
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.peers
def test_the_transformer_in_torch_has_the_losses_of_the_one_in_numpy_and_takes_over_its_checkpoint(train):
    alone = train(1, "", [], 4, "alone")
    train(2, "tcp", ["--tp", "2"], 2, "moved")
    moved = train(4, "tcp", THREE_AXES, 4, "moved", script="train_transformer_torch.py")
    np.testing.assert_allclose(moved, alone, rtol=0, atol=1e-12)
