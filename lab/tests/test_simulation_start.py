"""The predicted start of a job: near what was measured where that was possible, and never shorter with more ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.errors import UsageError
from oneaccord_lab.simulation.start import Costs, predict_start

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

# Without ssh, seconds to the end of the first all_reduce on one host of two processors: docs/measured/performance.md, "Starting".
MEASURED = [(2, 0.411), (64, 2.326)]


def total(hosts: int, per_host: int, processors: int | None = None, *, tree: bool = False, costs: Costs | None = None) -> float:
    return sum(stage.tree_s if tree else stage.star_s for stage in predict_start(hosts, per_host, processors, costs=costs))


@pytest.mark.parametrize(("ranks", "measured_s"), MEASURED)
def test_prediction_is_near_what_was_measured_on_one_host(ranks: int, measured_s: float) -> None:
    predicted = total(1, ranks, 2, costs=Costs(client_s=0, login_s=0))
    assert measured_s / 1.5 < predicted < measured_s * 1.5


@given(st.integers(1, 2000), st.integers(1, 64), st.booleans())
def test_more_hosts_or_ranks_never_start_sooner(hosts: int, per_host: int, tree: bool) -> None:
    now = total(hosts, per_host, 8, tree=tree)
    assert now <= total(hosts + 1, per_host, 8, tree=tree)
    assert now <= total(hosts, per_host + 1, 8, tree=tree)


def test_a_tree_reaches_many_hosts_sooner_and_few_hosts_no_later_than_a_star() -> None:
    many, few = predict_start(16384, 1)[0], predict_start(4, 1)[0]
    assert many.tree_s < many.star_s / 4
    assert few.tree_s == few.star_s


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_numbers_that_cannot_be_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        predict_start(*numbers)


def test_the_command_prints_each_stage_for_a_star_and_a_tree(run_python: Callable[..., CompletedProcess[str]]) -> None:
    words = ("-m", "oneaccord", "simulate", "start", "-n", "8192", "--ranks-per-host", "8")
    lines = run_python(*words).stdout.splitlines()
    assert lines[0].startswith("a prediction: the start of 8,192 ranks on 1,024 hosts")
    assert all(any(line.startswith(stage.name) for line in lines) for stage in predict_start(1024, 8))
    found = json.loads(run_python(*words, "--json").stdout)
    assert (found["hosts"], found["ranks"]) == (1024, 8192)
    assert found["star_s"] == pytest.approx(total(1024, 8))
    assert found["tree_s"] == pytest.approx(total(1024, 8, tree=True))
