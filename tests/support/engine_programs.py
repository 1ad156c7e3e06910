"""The programs that must run alike on each engine: a test module of an engine imports them, and has a fixture ``engine``.

An engine is one that this host starts for the tests, such as two ssh servers. What only one engine promises has tests beside its plugin.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oneaccord as oa
from support import launched
from support.on_hosts import holders, is_alive

__all__ = [
    "Engine",
    "TestWarm",
    "by_value",
    "test_engine_cancel_ends_all",
    "test_engine_ctrl_c_interrupts_the_program",
    "test_engine_deadline_names_ranks_and_frees_them",
    "test_engine_killed_driver_leaves_nothing",
    "test_engine_killed_rank_is_named",
    "test_engine_lost_rank_of_ranks_is_replaced_by_others",
    "test_engine_refuses_impossible_arguments",
    "test_engine_refuses_what_it_has_not",
    "test_engine_results_by_rank",
    "test_engine_two_jobs_at_once",
    "test_engine_world_of_one",
]

LONG_S = 120.0


@dataclass(frozen=True)
class Engine:
    """How the programs use an engine that runs.

    Attributes
    ----------
    name
        The name of its launcher.
    options
        Its options, as JSON takes them.
    refusals
        What it refuses in words: what is given besides, the error, and a pattern of its words.
    lost
        A pattern of how it says that rank 1 of 2 was killed.
    setup
        What a program of its own does before it launches.
    shows_output
        Whether the program sees what ranks print.
    repeats_output
        Whether it may see a line more than once, as if several nodes on one computer share a folder of logs.
    recover
        Called when a rank was killed.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    refusals: Sequence[tuple[Mapping[str, Any], type[Exception], str]] = ()
    lost: str = r"rank 1 of 2( on \S+( \(\S+\))?)? was lost: killed by SIGKILL"
    setup: str = ""
    shows_output: bool = True
    repeats_output: bool = False
    recover: Callable[[], None] = lambda: None

    def given(self, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"on": self.name, "backend": "tcp", **more, "options": {**self.options, **more.get("options", {})}}

    def launch(self, function: Callable[..., Any], n: int, *args: Any, **more: Any) -> list[Any]:
        return oa.launch(function, n, args=args, **self.given({"timeout_s": LONG_S, **more}))

    def ranks(self, n: int, **more: Any) -> oa.Ranks:
        return oa.Ranks(n, **self.given(more))


@contextlib.contextmanager
def by_value() -> Iterator[None]:
    """Send the functions of the programs by value, to workers that cannot import them."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(launched)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(launched)


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def began(folder: Path, count: int = 2) -> list[str]:
    """Return what the ranks that run `launched.notes` have noted, once all have."""
    until(lambda: len(list(folder.glob("*.began"))) == count)
    return [(folder / f"{rank}.began").read_text() for rank in range(count)]


def await_ended(folder: Path) -> None:
    """Wait until each rank has ended: its function, if its worker lives on, or else its process."""
    for path in folder.glob("*.began"):
        process = int(path.read_text().split()[0])
        until(lambda path=path, process=process: path.with_suffix(".ended").exists() or not is_alive(process))  # type: ignore[misc]


def test_engine_results_by_rank(engine: Engine) -> None:
    results = engine.launch(launched.adds, 3, 10.0, kwargs={"times": 5})
    assert results == [(rank, 3, 33.0) for rank in range(3)]


def test_engine_world_of_one(engine: Engine) -> None:
    assert engine.launch(launched.adds, 1, 10.0) == [(0, 1, 10.0)]


def test_engine_two_jobs_at_once(engine: Engine) -> None:
    found: dict[float, Any] = {}

    def one(value: float) -> None:  # from a thread, as a service does
        found[value] = engine.launch(launched.adds, 2, value, kwargs={"times": 20})

    threads = [threading.Thread(target=one, args=(value,)) for value in (1.0, 100.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert found == {value: [(rank, 2, 2 * value + 1) for rank in range(2)] for value in (1.0, 100.0)}


def test_engine_deadline_names_ranks_and_frees_them(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(oa.DeadlineError, match="within 4 s") as caught:
        engine.launch(launched.notes, 2, str(tmp_path), timeout_s=4.0)
    if list(tmp_path.glob("*.began")):  # a busy computer may still start the workers by then
        assert "ranks 0-1 of 2 had not finished notes()" in str(caught.value)
    await_ended(tmp_path)
    assert engine.launch(launched.adds, 2, 1.0) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_engine_cancel_ends_all(engine: Engine, tmp_path: Path) -> None:
    job = oa.launch_async(launched.notes, 2, args=(str(tmp_path),), **engine.given({}))
    try:
        noted = began(tmp_path)
        assert [(each.rank, each.state) for each in job.ranks] == [(0, "running"), (1, "running")]
        with pytest.raises(oa.DeadlineError, match="still running: rank 0, 1"):
            job.results(timeout_s=0.1)
        assert {note.split()[1] for note in noted} == {noted[0].split()[1]}
        assert holders(noted[0].split()[1]) == set()  # on no command line, and in the environment of no process
    finally:
        job.cancel()
    with pytest.raises(oa.AbortedError, match="cancelled"):
        job.results()
    await_ended(tmp_path)


def test_engine_killed_rank_is_named(engine: Engine) -> None:
    with pytest.raises(oa.RankError, match=engine.lost) as caught:
        engine.launch(launched.killed, 2, 1)
    assert caught.value.rank == 1
    engine.recover()
    assert engine.launch(launched.adds, 2, 1.0) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_engine_lost_rank_of_ranks_is_replaced_by_others(engine: Engine, tmp_path: Path) -> None:
    with engine.ranks(2, retries=1) as ranks:
        assert ranks.run(launched.adds, 1.0, timeout_s=LONG_S) == [(0, 2, 3.0), (1, 2, 3.0)]
        assert ranks.submit(launched.die, str(tmp_path / "once")).result(LONG_S) == "alive"
        assert list(ranks.map(launched.double, range(5), timeout=LONG_S)) == [0, 2, 4, 6, 8]
        with pytest.raises(oa.RankError, match=r"was lost .*, and a group needs all"):
            ranks.run(launched.adds, 1.0, timeout_s=LONG_S)
    engine.recover()


def test_engine_refuses_impossible_arguments(engine: Engine) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"n": 0}, oa.InvalidWorldSizeError, "n must be a positive number"),
        ({"per_host": 0}, oa.UsageError, "per_host must be"),
        ({"gpus": -1}, oa.UsageError, "gpus must be"),
        ({"args": "text"}, oa.UsageError, r"args=\(value,\)"),
        ({"args": [threading.Lock()]}, oa.UsageError, "cannot be pickled"),
        ({"kwargs": 5}, oa.UsageError, "kwargs must be a mapping"),
        ({"function": 5}, oa.UsageError, "function must be callable"),
        ({"timeout_s": 0}, oa.UsageError, "timeout_s"),
        ({"options": {"nonsense": 1}}, oa.UsageError, "nonsense"),
    ]
    for given, error, words in cases:
        with pytest.raises(error, match=words):
            oa.launch(**{"function": launched.adds, "n": 2, **engine.given(given)})


def test_engine_refuses_what_it_has_not(engine: Engine) -> None:
    assert engine.refusals
    for given, error, words in engine.refusals:
        with pytest.raises(error, match=words):
            oa.launch(**{"function": launched.pid, "n": 2, **engine.given(given)})


class TestWarm:
    """What two ranks that stay promise."""

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls, engine: Engine) -> Iterator[oa.Ranks]:
        with engine.ranks(2) as ranks:
            yield ranks

    def test_engine_warm_ranks_stay_in_their_processes(self, ranks: oa.Ranks) -> None:
        first = ranks.run(launched.pid, timeout_s=LONG_S)
        assert len(set(first)) == 2
        assert ranks.run(launched.adds, 1.0, times=3, timeout_s=LONG_S) == [(0, 2, 3.0), (1, 2, 3.0)]
        assert ranks.run(launched.pid, timeout_s=LONG_S) == first

    def test_engine_warm_large_arguments_and_results(self, ranks: oa.Ranks) -> None:
        data = np.arange(2_000_000)
        assert ranks.run(launched.sums, data, timeout_s=LONG_S) == [int(data.sum())] * 2
        results = ranks.run(launched.big, 16_000_000, timeout_s=LONG_S)
        assert [(len(each), int(each[0]), int(each[-1])) for each in results] == [(16_000_000, rank, rank) for rank in range(2)]

    def test_engine_warm_exception_comes_back_as_its_own_type(self, ranks: oa.Ranks) -> None:
        with pytest.raises(launched.OfItsOwn, match="no such thing") as caught:
            ranks.run(launched.fails, 1, timeout_s=LONG_S)
        assert caught.value.code == 7
        (note,) = caught.value.__notes__
        assert note.startswith("raised by fails() on rank 1 of 2")
        assert "then also: rank 0 (" in note
        assert ", in fails\n" in note  # its traceback; its source may be on this computer alone
        assert "worker_main" not in note

    @pytest.mark.parametrize(
        ("function", "error", "words"),
        [
            (
                launched.raises_unpicklable,
                oa.RankError,
                r"rank 1 of 2( on .*)? raised .*Unpicklable: words of it, which cannot be",
            ),
            (launched.unpicklable, oa.UsageError, "the result of rank 1 cannot be pickled"),
            (launched.exits, oa.RankError, r"rank 1 of 2( on .*)? ended with SystemExit: 3"),
        ],
        ids=["exception", "result", "exit"],
    )
    def test_engine_warm_ranks_serve_after_errors(
        self, ranks: oa.Ranks, function: Callable[..., Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            ranks.run(function, timeout_s=LONG_S)
        assert ranks.run(launched.adds, 1.0, timeout_s=LONG_S) == [(0, 2, 3.0), (1, 2, 3.0)]

    def test_engine_warm_ranks_serve_after_a_deadline(self, ranks: oa.Ranks) -> None:
        with pytest.raises(oa.DeadlineError, match=r"ranks 0-1 of 2 had not finished turns\(\) within 2 s"):
            ranks.run(launched.turns, timeout_s=2)
        assert ranks.run(launched.adds, 1.0, timeout_s=LONG_S) == [(0, 2, 3.0), (1, 2, 3.0)]

    def test_engine_warm_ranks_map_and_run_in_turn(self, ranks: oa.Ranks) -> None:
        futures = [ranks.submit(launched.double, value) for value in range(20)]
        assert ranks.run(launched.adds, 0.0, timeout_s=LONG_S) == [(0, 2, 1.0), (1, 2, 1.0)]
        assert [each.result(LONG_S) for each in futures] == list(range(0, 40, 2))

    def test_engine_warm_task_error_has_a_note(self, ranks: oa.Ranks) -> None:
        error = ranks.submit(launched.double, -2).exception(LONG_S)
        assert isinstance(error, launched.OfItsOwn)
        assert error.code == -2
        assert "raised by double() on rank" in error.__notes__[0]
        assert ", in double\n" in error.__notes__[0]

    def test_engine_warm_lambda_and_its_surroundings(self, ranks: oa.Ranks) -> None:
        factor = 3
        assert ranks.run(lambda group, *, more: factor * group.rank + more, more=1, timeout_s=LONG_S) == [1, 4]

    def test_engine_warm_ranks_left_by_an_exception_drop_tasks(self, engine: Engine, tmp_path: Path) -> None:
        late: list[Any] = []

        def leaves() -> None:
            with engine.ranks(1) as ranks:
                late.append(ranks.submit(launched.waits_for, str(tmp_path / "go")))
                late.append(ranks.submit(launched.double, 1))
                until((tmp_path / "go.begun").exists)
                raise KeyError

        try:
            with pytest.raises(KeyError):
                leaves()
            with pytest.raises(CancelledError):
                late[1].result(LONG_S)
        finally:
            (tmp_path / "go").touch()
        with pytest.raises(oa.ClosedError, match="no more"):
            raise_closed(engine)


def raise_closed(engine: Engine) -> None:
    ranks = engine.ranks(1)
    ranks.shutdown()
    ranks.submit(launched.double, 1)


DRIVER = """
import json, os, sys
import oneaccord as oa

sys.path.insert(0, sys.argv[4])
from support import launched

class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return type(self) is type(other) and self.x == other.x

def of_main(group, point):
    for turn in range(5):
        print("turn", turn, flush=True)
    return Point(3 * point.x + group.rank)

if __name__ == "__main__":
    folder, name, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    {setup}
    assert oa.launch(of_main, 2, on=name, args=(Point(5),), options=options, backend="tcp") == [Point(15), Point(16)]
    print("good", flush=True)
    import cloudpickle
    cloudpickle.register_pickle_by_value(launched)
    try:
        oa.launch(launched.notes, 2, on=name, args=(folder,), options=options, backend="tcp")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@contextlib.contextmanager
def driver(engine: Engine, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a program of its own, with functions of its own; its ranks wait when this has begun."""
    program = folder / "driver.py"
    program.write_text(textwrap.dedent(DRIVER).replace("{setup}", engine.setup or "pass"))
    tests = str(Path(__file__).resolve().parent.parent)
    words = [sys.executable, str(program), str(folder), engine.name, json.dumps(dict(engine.options)), tests]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder) as process:
        try:
            yield process
        finally:
            process.kill()


def test_engine_killed_driver_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    with driver(engine, tmp_path) as process:
        assert process.stdout is not None
        said: list[str] = []
        wanted = {f"[{rank}] turn {turn}" for rank in range(2) for turn in range(5)} if engine.shows_output else set[str]()
        for line in process.stdout:
            found = re.search(r"\[\d+\] .*", line)  # an engine may put words of its own in front, and colours
            said.append(found[0] if found else line.rstrip("\n"))
            if wanted | {"good"} <= set(said):
                break
        assert "good" in said
        began(tmp_path)
        process.kill()
    if engine.repeats_output:
        said = [*dict.fromkeys(said)]
    for rank in range(2 if engine.shows_output else 0):  # what one rank prints keeps its order
        assert [line for line in said if line.startswith(f"[{rank}]")] == [f"[{rank}] turn {turn}" for turn in range(5)]
    await_ended(tmp_path)


def test_engine_ctrl_c_interrupts_the_program(engine: Engine, tmp_path: Path) -> None:
    with driver(engine, tmp_path) as process:
        began(tmp_path)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=LONG_S)
    assert (process.returncode, out.splitlines()[-1]) == (0, "interrupted")
    await_ended(tmp_path)
