"""What the checks of leaks and of deaths make of what they see, without a world: what is another program's is not seen."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oneaccord_conformance import Outcome, patience
from oneaccord_conformance.chapters import death_, leaks_


@pytest.fixture
def shared() -> Iterator[list[Path]]:
    """Four names of shared memory, which nobody else has."""
    names = [Path(f"/dev/shm/conformance-{os.getpid()}-{number}") for number in range(4)]
    yield names
    for each in names:
        each.unlink(missing_ok=True)


def new(before: dict[str, set[Any]], kind: str) -> set[Any]:
    return leaks_._held()[kind] - before[kind]


def test_only_what_this_process_makes_in_shared_folders_is_seen(shared: list[Path]) -> None:
    mine, mapped, others, held = shared
    leaks_._listen()
    before, usual = leaks_._held(), tempfile.gettempdir()
    subprocess.run(["touch", str(others)], check=True)
    mine.touch()
    for name, look in ((mapped, lambda number: mmap.mmap(number, 1).close()), (held, lambda _: leaks_._note())):
        flags = os.O_CREAT | os.O_RDWR
        descriptor = ctypes.CDLL(None).shm_open(f"/{name.name}".encode(), flags, 0o600)  # Python does not see the name
        os.ftruncate(descriptor, 1)
        look(descriptor)
        os.close(descriptor)
    assert new(before, "files in /dev/shm") == {str(mine), str(mapped), str(held)}
    with leaks_._own_folder():
        before = leaks_._held()
        other = Path(subprocess.check_output(["mktemp", "-p", usual], text=True).strip())
        told = Path(subprocess.check_output(["mktemp"], text=True).strip())  # by TMPDIR, as a library of C may be
        with tempfile.NamedTemporaryFile() as made:
            assert new(before, "temporary files") == {Path(made.name).name, told.name}
        other.unlink()
    assert (tempfile.gettempdir(), told.exists()) == (usual, False)


def test_what_ends_meanwhile_hides_nothing_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PROMPT_S", 0.0)  # what is left does not go
    older = [os.pipe() for _ in range(6)]
    left: list[tuple[int, int]] = []

    def action() -> None:
        if len(left) >= 2:
            close(older.pop())
        left.append(os.pipe())

    with leaks_._own_folder():
        grown = leaks_._repeat(action, 2, 6)
    assert grown == "12 open files and sockets"
    for pair in left:
        close(pair)


def close(pair: tuple[int, int]) -> None:
    for descriptor in pair:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("steps", "is_leak"),
    [
        ([1.0] * 6, True),
        ([1, 1, 1, -9, 1, 1], True),
        ([0, 0, 900, 0, 0, 0], False),
        ([0.1] * 6, False),
        ([0, 0, 0, 0, 9, 9], False),
    ],
    ids=["steady", "freed once", "a burst", "too little", "two bursts"],
)
def test_memory_that_grows_most_of_the_time_is_a_leak(
    steps: list[float], is_leak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([100.0 + sum(steps[:number]) for number in range(7)])
    monkeypatch.setattr(leaks_, "used_mib", lambda: next(used))
    with leaks_._own_folder():
        grown = leaks_._repeat(lambda: None, 0, 6)
    assert grown == (f"{sum(steps):.0f} MiB of memory" if is_leak else "")


def ended(**facts: Any) -> Outcome:
    usual = {"value": None, "errors": ("PeerLostError",), "text": "", "peer": 1, "took_s": 0.0, "ended": 0.5}
    return Outcome(usual | facts)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (ended(), ""),
        (None, "rank 2 did not return, or ended without a word"),
        (Outcome(None, ("OSError",)), "rank 2 raised OSError"),
        (ended(errors=()), "rank 2 got no error"),
        (ended(peer=0), "rank 2 got an error about rank 0"),
        (ended(ended=patience.PROMPT_S + 1), "rank 2 learned of it after 21.0 s"),
    ],
)
def test_each_way_not_to_be_told_of_a_death_is_found(told: Outcome | None, words: str) -> None:
    class Job:
        def outcomes(self, patience_s: float, lost: tuple[int, ...]) -> list[Outcome | None]:
            return [ended(), None, told]

        def whereabouts(self) -> str:
            return ""

    def look() -> None:
        death_._look(Job(), 1, 0.0, "PeerLostError", signal.SIGKILL.name)  # type: ignore[arg-type]

    if not words:
        look()
        return
    with pytest.raises(AssertionError, match=words):
        look()
