"""Checks fail for backends that break the contract, and say what is wrong; no fault makes the suite hang."""

from __future__ import annotations

import pytest

from manyhands_conformance import WorldMaker, all_checks, run_checks

FAULTS = {
    "zeros are sent": ("bytes.every_dtype_travels", r"broadcast of bool\[4\]: . of 4 elements are wrong"),
    "the last byte is lost": (
        "messages.every_size",
        r"(recv|sendrecv) of uint8\[\d+\]: 1 of \d+ elements are wrong, the first is element",
    ),
    "long messages arrive backwards": ("bytes.long_arrays", r"elements are wrong"),
    "empty messages are not waited for": ("bytes.barriers", r"a rank left it 0\.\d+ s before the last one had come"),
    "headers are not compared": ("mismatches.arguments", r"got \w+, and not CollectiveMismatchError|was told nothing"),
    "sends end too early": (
        "messages.memory_is_free",
        r"of a rank that wrote to it after send returned: \d+ of \d+ elements are wrong",
    ),
    "deadlines are ignored": ("deadlines.late_rank", r"did not return from _late"),
    "abort is ignored": ("close.error_of_a_rank", r"was told after|did not return|not all ranks left"),
    "sockets are left behind": ("leaks.worlds", r"it holds more: \d+ open files and sockets"),
    "threads are left behind": ("leaks.worlds", r"it holds more: \d+ threads"),
    "memory is left behind": ("leaks.worlds", r"it holds more: \d+ MiB of memory"),
    "waiting takes long": ("speed.share", r"short messages there and back: \d+ us, and two plain threads need \d+ us"),
    "close of a second time fails": ("close.twice_and_used_afterwards", r"raised RuntimeError.*closed already"),
}

# What hangs is waited for until patience ends, and what leaks or is slow is looked at twice.
SLOW = {
    "headers are not compared",
    "abort is ignored",
    "deadlines are ignored",
    "threads are left behind",
    "memory is left behind",
    "sockets are left behind",
    "waiting takes long",
}


@pytest.mark.parametrize("fault", [pytest.param(each, marks=pytest.mark.long if each in SLOW else ()) for each in FAULTS])
@pytest.mark.usefixtures("broken_backend")
def test_a_fault_is_found_by_the_check_that_is_for_it(fault: str) -> None:
    title, words = FAULTS[fault]
    worlds = WorldMaker("broken", {"backends": {"broken": {"fault": fault}}}, quick=True)
    report = run_checks([each for each in all_checks() if each.title == title], worlds)
    worlds.rest()
    assert [each.status for each in report.results] == ["failed"]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(report.results[0].text)


@pytest.mark.long
@pytest.mark.usefixtures("broken_backend")
def test_a_rank_that_dies_unnoticed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_PLUGINS", "broken_backends")  # for processes, which have no tests that register it
    worlds = WorldMaker("broken", {"backends": {"broken": {"fault": "abort is ignored"}}}, quick=True)
    report = run_checks([each for each in all_checks() if each.title == "death.killed"], worlds)
    worlds.rest()
    assert [each.status for each in report.results] == ["failed"]
    assert "rank 1 of 3 was killed" in report.results[0].text
    assert "was told after" in report.results[0].text


@pytest.mark.usefixtures("broken_backend")
def test_the_same_backend_without_a_fault_conforms() -> None:
    worlds = WorldMaker("broken", quick=True)
    report = run_checks([each for each in all_checks() if each.title in {title for title, _ in FAULTS.values()}], worlds)
    assert not worlds.rest()
    assert [each.text for each in report.results if each.status != "passed"] == []
