"""Waits for a library by tests end: with what they wait for, at the deadline, or with the job."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from oneaccord.api import Deadline, wait_until
from oneaccord.kit import waiting


def nothing() -> None:
    pass


def test_a_wait_ends_when_what_it_waits_for_is_there():
    answers = iter([False] * 200 + [True])
    wait_until(lambda: next(answers), nothing, Deadline(30), spin_s=0.0)
    assert next(answers, None) is None


@pytest.mark.parametrize("spin_s", [0.0, 60.0])
def test_a_wait_ends_at_the_deadline_or_with_the_job_however_long_it_may_spin(spin_s: float):
    def ended() -> None:
        raise ConnectionError

    with pytest.raises(TimeoutError):
        wait_until(lambda: False, nothing, Deadline(0.02), spin_s)
    with pytest.raises(ConnectionError):
        wait_until(lambda: False, ended, Deadline(30), spin_s)


@pytest.mark.parametrize("spin_s", [0.0, 60.0])
def test_a_long_wait_says_so_also_while_it_spins(monkeypatch: pytest.MonkeyPatch, spin_s: float):
    ticks = itertools.count(0.0, 0.01)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda _: None))
    said: list[float] = []
    wait_until(lambda: len(said) == 3, nothing, Deadline(1e9), spin_s, lambda: said.append(next(ticks)))
    assert said == pytest.approx([0.4, 0.9, 1.4], abs=0.05)


def test_wait_until_sleeps_longer_each_time_and_not_past_the_deadline(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=0.0, slept=[])

    def sleep(seconds: float) -> None:
        clock.slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    deadline = Deadline(10.0, lambda: clock.now)
    with pytest.raises(TimeoutError):
        wait_until(lambda: False, nothing, deadline, 0.0, None, (1.0, 3.0))
    assert clock.slept == [1.0, 1.5, 2.25, 3.0, 2.25]
