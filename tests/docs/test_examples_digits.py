"""The example of the README: it learns, in one process started by plain python."""

from __future__ import annotations

import re
import tomllib

import pytest


def test_the_digits_example_reaches_its_accuracy_as_a_world_of_one(repository, run_python):
    answer = run_python(repository / "examples" / "train_digits.py")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "1437 images to train on, 360 to test with, 1 rank(s)" in answer.stdout
    accuracy = re.search(r"test accuracy (\d\.\d+)", answer.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95
    assert "weights on all 1 rank(s): bit-identical" in answer.stdout
    assert "[##############################] epoch 30/30" in answer.stdout


def test_the_digits_example_fails_when_it_learns_too_little(repository, run_python, tmp_path):
    source = (repository / "examples" / "train_digits.py").read_text(encoding="utf-8")
    data = repository / "examples" / "data" / "digits.csv"
    weak = source.replace("EPOCHS, BATCH = 30, 64", "EPOCHS, BATCH = 1, 1437").replace(
        'Path(__file__).parent / "data" / "digits.csv"', f"Path({str(data)!r})"
    )
    (tmp_path / "weak.py").write_text(weak, encoding="utf-8")
    answer = run_python("-m", "oneaccord", "run", "-n", "1", "weak.py")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "test accuracy 0." in answer.stdout


def test_the_digits_are_the_1797_images_of_the_source(repository):
    lines = (repository / "examples" / "data" / "digits.csv").read_text(encoding="ascii").splitlines()
    rows = [[int(value) for value in line.split(",")] for line in lines]
    assert len(rows) == 1797
    assert {len(row) for row in rows} == {65}
    assert {value for row in rows for value in row[:-1]} == set(range(17))
    counts = [sum(row[-1] == digit for row in rows) for digit in range(10)]
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_digits_example_gives_the_same_on_several_ranks(repository, run_python):
    command = ["-m", "oneaccord", "run", "-n", "3", "--backend", "tcp", repository / "examples" / "train_digits.py"]
    answer = run_python(*command)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "weights on all 3 rank(s): bit-identical" in answer.stdout
    accuracy = re.search(r"test accuracy (\d\.\d+)", answer.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95


def test_the_line_to_change_in_the_examples_config_is_there(repository):
    settings = tomllib.loads((repository / "examples" / "oneaccord.toml").read_text(encoding="utf-8"))
    assert settings == {"backend": "tcp"}


@pytest.mark.peers
def test_the_digits_example_in_torch_learns_the_same_on_one_rank_and_on_several(repository, run_python):
    script = repository / "examples" / "train_digits_torch.py"
    for command in ([script], ["-m", "oneaccord", "run", "-n", "3", "--no-prefix", "--backend", "tcp", script]):
        answer = run_python(*command)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        accuracy = re.search(r"test accuracy (\d\.\d+)", answer.stdout)
        assert accuracy is not None
        assert float(accuracy[1]) >= 0.95


def test_the_lines_that_make_the_example_in_torch_parallel_are_ten(repository):
    text = (repository / "examples" / "train_digits_torch.py").read_text(encoding="utf-8")
    assert len(re.findall(r"# <-", text)) == 10
