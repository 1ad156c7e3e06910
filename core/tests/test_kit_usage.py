"""The use of a library ends, keeps memory, and says whether a dead peer explains an error."""

from __future__ import annotations

import threading

import pytest

from oneaccord.api import CommError, ConfigError, Deadline, LibraryUse, LinkLost, compare_settings
from oneaccord.kit import usage


def test_check_names_the_first_reason():
    use = LibraryUse("Pony", 2, 3)
    use.check()
    use.end("the job was aborted")
    use.end("the backend was closed")
    with pytest.raises(LinkLost, match="the job was aborted") as caught:
        use.check()
    assert caught.value.peer == 0
    with pytest.raises(LinkLost) as caught:
        use.check(1)
    assert caught.value.peer == 1


def test_memory_is_held_until_it_is_released():
    use, memory = LibraryUse("Pony", 0, 2), bytearray(8)
    use.hold(memory)
    use.hold(memory)
    assert list(use.held.values()) == [memory]
    use.release(bytearray(8))
    assert use.held
    use.release(memory)
    use.release(memory)
    assert not use.held


def test_patience_grows_with_the_message():
    use = LibraryUse("Pony", 0, 2, spin_s=0.5)
    assert (use.patience_s(0), use.patience_s(250_000_000)) == (0.5, 1.5)


def test_wait_for_tells_of_all_other_ranks_and_ends_with_the_job():
    use = LibraryUse("Pony", 1, 3)
    told: list[list[int]] = []

    def on_stall(ranks: list[int]) -> None:
        told.append(ranks)
        use.end("the job was aborted")

    with pytest.raises(LinkLost, match="the job was aborted"):
        use.wait_for(lambda: False, 0, Deadline(30), on_stall)
    assert told == [[0, 2]]
    with pytest.raises(TimeoutError):
        LibraryUse("Pony", 1, 3).wait_for(lambda: False, 0, Deadline(0.01), None)
    use.wait_for(lambda: True, 0, Deadline(30), None)  # what is done is done


def test_failure_blames_the_job_once_it_has_a_reason(monkeypatch: pytest.MonkeyPatch):
    use = LibraryUse("Pony", 0, 2)
    asked = threading.Event()

    def wait_until(done: object, check: object, deadline: Deadline, spin_s: float) -> None:
        asked.set()
        wait(done, check, deadline, spin_s)

    wait = usage.wait_until
    monkeypatch.setattr(LibraryUse, "verdict_s", 30.0)
    monkeypatch.setattr(usage, "wait_until", wait_until)

    def job() -> None:
        assert asked.wait(30)
        use.end("rank 1 died")

    thread = threading.Thread(target=job)
    thread.start()
    error = use.failure("a leg broke")
    thread.join()
    assert isinstance(error, LinkLost)
    assert (error.peer, error.reason) == (1, "rank 1 died; a leg broke")


def test_failure_without_a_reason_is_one_of_the_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LibraryUse, "verdict_s", 0.01)
    error = LibraryUse("Pony", 1, 2).failure("a leg broke")
    assert isinstance(error, CommError)
    assert "Pony failed: a leg broke" in str(error)


def test_compare_settings_names_the_first_rank_that_differs():
    compare_settings("pony", [{"stable": "north"}] * 3)
    with pytest.raises(
        ConfigError, match=r"backends\.pony\.stable is north on rank 0 and south on rank 2: all ranks"
    ) as caught:
        compare_settings("pony", [{"stable": "north"}, {"stable": "north"}, {"stable": "south"}])
    assert (caught.value.key, caught.value.value) == ("backends.pony.stable", "south")
    with pytest.raises(ConfigError, match=r"the version of Pony is 1\.2 on rank 0 and 1\.3 on rank 1"):
        compare_settings("pony", [{"library": "1.2"}, {"library": "1.3"}], {"library": "the version of Pony"})
    with pytest.raises(ConfigError, match=r"backends\.pony\.check is None on rank 0 and True on rank 1"):
        compare_settings("pony", [{}, {"check": True}])
