"""`launch`: a function on ranks of this host, its results, its errors and its end."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from support import launched, preloaded
from support.launch_tools import Deadlines, Watch, deadlines, environment, watch

import oneaccord as oa
from oneaccord.common.installing import install_command

__all__ = ["deadlines", "watch"]

LONG_S = 120.0


def test_launch_returns_results_by_rank() -> None:
    results = oa.launch(launched.adds, 3, args=(10.0,), kwargs={"times": 5}, timeout_s=LONG_S)
    assert results == [(rank, 3, 33.0) for rank in range(3)]


def test_launch_of_one_is_a_world_of_one() -> None:
    assert oa.launch(launched.adds, 1, args=(10.0,), timeout_s=LONG_S) == [(0, 1, 10.0)]


def test_launch_result_of_100_mb_arrives() -> None:
    results = oa.launch(launched.big, 2, args=(100_000_000,), timeout_s=LONG_S)
    assert [(len(result), int(result[0]), int(result[-1])) for result in results] == [(100_000_000, 0, 0), (100_000_000, 1, 1)]


def test_launch_large_argument_arrives() -> None:
    given = np.arange(4_000_000, dtype=np.int64)
    (result,) = oa.launch(launched.sums, 1, args=(given,), timeout_s=LONG_S)
    assert result == int(given.sum())


def test_launch_from_a_thread_works() -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.extend(oa.launch(launched.adds, 2, args=(1.0,), timeout_s=LONG_S)))
    thread.start()
    thread.join(LONG_S)
    assert results == [(0, 2, 3.0), (1, 2, 3.0)]


def test_launch_exception_comes_back_as_its_own_type() -> None:
    with pytest.raises(launched.OfItsOwn) as caught:
        oa.launch(launched.fails, 3, args=(2,), timeout_s=LONG_S)
    assert caught.value.code == 7
    (note,) = caught.value.__notes__
    assert note.startswith("raised by fails() on rank 2 of 3; then also: rank 0 (")
    assert "raise OfItsOwn(7" in note
    assert "worker_main" not in note


def test_launch_exception_that_cannot_be_pickled_keeps_its_words() -> None:
    with pytest.raises(oa.RankError, match=r"rank 1 of 2 raised .*Unpicklable: words of it, which cannot be pickled") as caught:
        oa.launch(launched.raises_unpicklable, 2, timeout_s=LONG_S)
    assert caught.value.rank == 1


def test_launch_result_that_cannot_be_pickled_names_the_rank() -> None:
    with pytest.raises(oa.UsageError, match="the result of rank 1 cannot be pickled"):
        oa.launch(launched.unpicklable, 2, timeout_s=LONG_S)


@pytest.mark.parametrize("fork", [True, False])
def test_launch_killed_rank_is_named_with_its_signal(fork: bool) -> None:
    with pytest.raises(oa.RankError, match="rank 1 of 3 was lost: killed by SIGKILL") as caught:
        oa.launch(launched.killed, 3, args=(1,), timeout_s=LONG_S, options={"fork": fork})
    assert caught.value.rank == 1


def test_launch_rank_that_exits_does_not_end_the_program() -> None:
    with pytest.raises(oa.RankError, match="rank 1 of 2 ended with SystemExit: 3"):
        oa.launch(launched.exits, 2, timeout_s=LONG_S)


def test_launch_deadline_names_late_ranks_and_ends_all(watch: Watch, deadlines: Deadlines) -> None:
    job = oa.launch_async(launched.hang, 3, args=(str(watch.path), (0, 2)), timeout_s=600.0)
    watch.wait_for(3)
    deadlines.pass_now()
    with pytest.raises(oa.DeadlineError, match=r"ranks 0, 2 of 3 had not finished hang\(\) within 600 s"):
        job.results()
    watch.assert_all_gone()


def test_launch_async_cancel_ends_all(watch: Watch) -> None:
    job = oa.launch_async(launched.aborts, 2, args=(str(watch.path),))
    watch.wait_for(2)
    assert [(each.rank, each.state) for each in job.ranks] == [(0, "running"), (1, "running")]
    with pytest.raises(oa.DeadlineError, match="still running: rank 0, 1"):
        job.results(timeout_s=0.1)
    job.cancel()
    watch.assert_all_gone()
    with pytest.raises(oa.AbortedError, match="cancelled"):
        job.results()


def test_launch_two_at_once_each_right() -> None:
    jobs = [oa.launch_async(launched.adds, 2, args=(value,), kwargs={"times": 20}, timeout_s=LONG_S) for value in (1.0, 100.0)]
    assert [job.results() for job in jobs] == [[(0, 2, 3.0), (1, 2, 3.0)], [(0, 2, 201.0), (1, 2, 201.0)]]


def test_launch_output_goes_to_sys_stdout_with_prefixes() -> None:
    # As ipykernel does: the file 1 is another one than sys.stdout.
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        oa.launch(launched.speaks, 2, timeout_s=LONG_S)
    assert sorted(out.getvalue().splitlines()) == ["[0] this is 0", "[1] this is 1"]
    assert sorted(err.getvalue().splitlines()) == ["[0] trouble 0", "[1] trouble 1"]


def test_launch_options_reach_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"prefix": False, "environ": {"OF_MINE": "yes"}}
    assert oa.launch(launched.shows, 1, args=("OF_MINE",), options=options, timeout_s=LONG_S) == [["yes"]]
    oa.launch(launched.speaks, 1, options=options, timeout_s=LONG_S)
    assert capsys.readouterr().out == "this is 0\n"


def test_launch_gpus_each_rank_sees_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    name = "CUDA_VISIBLE_DEVICES"
    assert oa.launch(launched.shows, 2, args=(name,), gpus=2, timeout_s=LONG_S) == [["4,5"], ["6,7"]]
    with pytest.raises(oa.UsageError, match="need 6 GPUs, and this host has 4"):
        oa.launch(launched.shows, 3, args=(name,), gpus=2)


def test_launch_stdin_of_ranks_is_empty() -> None:
    assert oa.launch(launched.opens, 2, timeout_s=LONG_S) == ["", ""]


def test_launch_leaves_signal_handlers_alone() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    job = oa.launch_async(launched.adds, 1, args=(1.0,), timeout_s=LONG_S)
    during = [signal.getsignal(number) for number in numbers]
    job.results()
    assert during == before


def test_launch_other_children_of_the_program_stay_its_own() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(5)"], stdin=subprocess.PIPE) as child:
        oa.launch(launched.adds, 2, args=(1.0,), timeout_s=LONG_S)
        assert child.poll() is None
        child.communicate()
        assert child.returncode == 5


MAIN = """
import sys
import numpy as np
import oneaccord as oa

class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return type(self) is type(other) and self.x == other.x

SCALE = 3
def of_main(group, point):
    return Point(SCALE * point.x + group.rank)

if __name__ == "__main__":
    assert oa.launch(of_main, 2, args=(Point(5),), timeout_s=100) == [Point(15), Point(16)]
    assert oa.launch(lambda group: group.rank, 2, timeout_s=100) == [0, 1]
    print("good")
"""


def script(directory: Path, text: str, *words: str, before: str = "", **more: object) -> subprocess.Popen[str]:
    path = directory / "program.py"
    path.write_text(textwrap.dedent(before) + textwrap.dedent(text))
    return preloaded.Popen(
        [sys.executable, str(path), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(PRELOADED_RANKS="1"),
        cwd=directory,
    )


def test_launch_of_main_and_lambda_by_cloudpickle(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    out, _ = script(tmp_path, MAIN).communicate(timeout=170)
    assert out == "good\n"


def test_launch_of_main_without_cloudpickle_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # within the clone, the command has other paths
    out, _ = script(tmp_path, MAIN, before="import sys\nsys.modules['cloudpickle'] = None\n").communicate(timeout=170)
    assert "UsageError: the function of_main with its arguments cannot be sent to the ranks by its name" in out
    install = install_command("pip install 'oneaccord[launch]'")
    assert f"Install cloudpickle ({install})" in out


INTERRUPTED = """
import sys, signal
import oneaccord as oa
sys.path.insert(0, sys.argv[3])
from support import launched
if __name__ == "__main__":
    try:
        oa.launch(launched.interrupted, 2, args=sys.argv[1:3])
    except KeyboardInterrupt:
        print("interrupted")
"""
TESTS = str(Path(__file__).parent.parent)


def test_launch_ctrl_c_interrupts_ranks_and_program(tmp_path: Path, watch: Watch) -> None:
    note = tmp_path / "note"
    driver = script(tmp_path, INTERRUPTED, str(watch.path), str(note), TESTS)
    watch.wait_for(2)
    driver.send_signal(signal.SIGINT)
    out, _ = driver.communicate(timeout=60)
    watch.assert_all_gone()
    assert (driver.returncode, out.splitlines()[-1]) == (0, "interrupted")
    assert [(tmp_path / f"note.{rank}").read_text() for rank in range(2)] == ["<class 'KeyboardInterrupt'>"] * 2


@pytest.mark.parametrize("fork", [True, False])
def test_launch_driver_killed_leaves_no_rank(tmp_path: Path, watch: Watch, fork: bool) -> None:
    text = INTERRUPTED.replace("args=sys.argv[1:3]", f"args=sys.argv[1:3], options={{'fork': {fork}}}")
    driver = script(tmp_path, text, str(watch.path), str(tmp_path / "note"), TESTS)
    watch.wait_for(2)
    driver.kill()
    driver.communicate(timeout=60)
    watch.assert_all_gone()


def test_launch_program_that_ends_leaves_no_rank(tmp_path: Path, watch: Watch) -> None:
    text = INTERRUPTED.replace("oa.launch(", "job = oa.launch_async(").replace("    except", "        input()\n    except")
    with (tmp_path / "go").open("w") as _:
        pass
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    words = [sys.executable, str(path), str(watch.path), str(tmp_path / "note"), TESTS]
    with preloaded.Popen(words, stdin=subprocess.PIPE, env=environment(PRELOADED_RANKS="1"), cwd=tmp_path) as driver:
        watch.wait_for(2)
        driver.communicate(b"\n", timeout=60)
    watch.assert_all_gone()
    assert driver.returncode == 0


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"n": 0}, oa.InvalidWorldSizeError, "n must be a positive number"),
        ({"n": 2, "on": "nowhere"}, oa.UsageError, "nowhere"),
        ({"n": 2, "options": {"prefx": True}}, oa.UsageError, "prefix, grace_s, environ, fork"),
        ({"n": 2, "per_host": 1}, oa.UsageError, "this is one host"),
        ({"n": 2, "per_host": 0}, oa.UsageError, "per_host"),
        ({"n": 2, "gpus": -1}, oa.UsageError, "gpus"),
        ({"n": 2, "args": "text"}, oa.UsageError, r"args=\(value,\)"),
        ({"n": 2, "timeout_s": 0}, oa.UsageError, "timeout_s"),
        ({"n": 2, "backend": "tpc"}, oa.UnknownBackendError, "tpc"),
        ({"n": 2, "backend": "simulated"}, oa.UsageError, "starts its ranks itself"),
        ({"n": 2, "args": [threading.Lock()]}, oa.UsageError, "cannot be"),
        ({"n": 2, "function": 5}, oa.UsageError, "callable"),
        ({"n": 2, "kwargs": 5}, oa.UsageError, "kwargs must be a mapping"),
    ],
)
def test_launch_argument_that_cannot_be_is_refused(given: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        oa.launch(**{"function": launched.adds, **given})  # type: ignore[arg-type]


def test_launch_backend_and_config_reach_ranks(tmp_path: Path) -> None:
    assert oa.launch(launched.backend_name, 2, backend="tcp", timeout_s=LONG_S) == ["tcp", "tcp"]
    assert oa.launch(launched.backend_name, 2, config={"backend": "tcp"}, timeout_s=LONG_S) == ["tcp", "tcp"]
    (tmp_path / "mine.toml").write_text('backend = "tcp"\n')
    assert oa.launch(launched.backend_name, 2, config=tmp_path / "mine.toml", timeout_s=LONG_S) == ["tcp", "tcp"]


BY_VALUE = """
import sys
import cloudpickle
import oneaccord as oa
import only_here

if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(only_here)
    sys.path.remove(sys.path[0])
    print(oa.launch(only_here.twice, 2, args=(4,), options={"environ": {"PYTHONSAFEPATH": "1"}}, timeout_s=100))
"""


def test_launch_module_registered_by_value_needs_no_module_there(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "only_here.py").write_text("def twice(group, value):\n    return 2 * value\n")
    program = tmp_path / "program.py"
    program.write_text(BY_VALUE)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=elsewhere,
        timeout=170,
        check=False,
    )
    assert (found.stdout, found.returncode) == ("[8, 8]\n", 0), found.stderr


IN_THREAD = """
import signal, subprocess, sys, threading
from oneaccord.local.launching import Launch
from oneaccord.local.processes import run_job

codes = []
def run(fork):
    codes.append(run_job(Launch(sys.argv[1], ranks=2, fork=fork)))
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(5)"], stdin=subprocess.PIPE)
threads = [threading.Thread(target=run, args=(fork,)) for fork in (True, False)]
for each in threads: each.start()
for each in threads: each.join()
child.communicate()
print(codes, child.returncode, signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
"""


def test_run_job_in_threads_gives_codes_and_keeps_signals(tmp_path: Path) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text("import oneaccord as oa, sys\nwith oa.init() as group:\n    group.barrier()\nsys.exit(3 * group.rank)\n")
    out, _ = script(tmp_path, IN_THREAD, str(rank)).communicate(timeout=170)
    assert out.splitlines()[-1] == "[3, 3] 5 True", out


FORKING = INTERRUPTED.replace(
    "        oa.launch(launched.interrupted, 2, args=sys.argv[1:3])",
    """        job = oa.launch_async(launched.interrupted, 2, args=sys.argv[1:3], options={"fork": FORK})
        sys.stdin.readline()
        if not (child := os.fork()):
            signal.pause()
        print(child, flush=True)
        job.results()""",
).replace("import sys, signal", "import os, sys, signal")


@pytest.mark.parametrize("fork", [True, False])
def test_launch_killed_driver_with_forked_child_leaves_no_rank(tmp_path: Path, watch: Watch, fork: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(FORKING.replace("FORK}", f"{fork}}}"))
    words = [sys.executable, str(program), str(watch.path), str(tmp_path / "note"), TESTS]
    environ = environment(PRELOADED_RANKS="1")
    with preloaded.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=tmp_path) as driver:
        watch.wait_for(2)
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write("fork\n")
        driver.stdin.flush()
        child = int(driver.stdout.readline())
        driver.kill()
        driver.wait(60)
        try:
            watch.assert_all_gone()
        finally:
            os.kill(child, signal.SIGKILL)
