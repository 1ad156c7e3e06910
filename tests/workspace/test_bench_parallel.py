"""`benchmarks/parallel.py`, next to the real torch; its times mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]


def test_it_measures_prints_and_writes(run_python, repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    options = ["--rounds", "1", "--backends", "tcp", "--ranks", "2", "--mebibytes", "1", "--json", file]
    done = run_python(repository / "benchmarks" / "parallel.py", *map(str, options), timeout_s=280)

    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["found"]["tcp"]
    assert list(found) == ["checkpoints", "stalls", "steps", "memory", "pipelines", "redistribute", "calls"]
    for topic, rows in found.items():
        assert f"{topic}, over tcp" in done.stdout
        assert all(value > 0 for row in rows for value in row.values() if isinstance(value, int)), rows
    ours = [row for row in found["pipelines"] if row["by"] == "oneaccord, tcp"]
    assert len(ours) >= 4
    assert all(row["held_bytes"] == row["formula_bytes"] for row in ours)
    for row in found["redistribute"]:
        if row["by"] == "oneaccord, tcp":
            assert row["explained_bytes"] <= row["sent_bytes"] < row["explained_bytes"] + 2000
        else:
            assert row["sent_bytes"] >= 2 * row["explained_bytes"]
