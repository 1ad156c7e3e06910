"""The example of the README: it learns, in one process started by plain python."""

from __future__ import annotations

import re
import tomllib

import pytest


def accuracy_of(answer):
    """Return the accuracy that a program prints."""
    accuracy = re.search(r"accuracy (\d+\.\d)% on images", answer.stdout)
    assert accuracy is not None, answer.stdout + answer.stderr
    return float(accuracy[1])


def test_the_digits_example_reaches_its_accuracy_as_a_world_of_one(repository, run_python):
    answer = run_python(repository / "examples" / "gallery" / "digits.py")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert accuracy_of(answer) >= 95
    assert "epoch 30: loss 0.0" in answer.stdout


def test_the_digits_example_fails_when_it_learns_too_little(repository, run_python, tmp_path):
    source = (repository / "examples" / "gallery" / "digits.py").read_text(encoding="utf-8")
    assert "epochs: int = 30" in source
    weak = source.replace("epochs: int = 30", "epochs: int = 0").replace(
        "import sys\n", f"import sys\nsys.path.insert(0, {str(repository / 'examples' / 'gallery')!r})\n"
    )
    (tmp_path / "weak.py").write_text(weak, encoding="utf-8")
    answer = run_python("-m", "oneaccord", "run", "-n", "1", "weak.py")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert accuracy_of(answer) < 50


def test_the_digits_are_the_1797_images_of_the_source(repository):
    lines = (repository / "examples" / "data" / "digits.csv").read_text(encoding="ascii").splitlines()
    rows = [[int(value) for value in line.split(",")] for line in lines]
    assert len(rows) == 1797
    assert {len(row) for row in rows} == {65}
    assert {value for row in rows for value in row[:-1]} == set(range(17))
    counts = [sum(row[-1] == digit for row in rows) for digit in range(10)]
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_digits_example_reaches_its_accuracy_on_several_ranks(repository, run_python):
    command = ["-m", "oneaccord", "run", "-n", "3", "--backend", "tcp", repository / "examples" / "gallery" / "digits.py"]
    answer = run_python(*command)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert accuracy_of(answer) >= 95


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
