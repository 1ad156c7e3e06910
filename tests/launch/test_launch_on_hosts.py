"""``oneaccord.launch`` over a launcher of hosts, which are addresses of this one here."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support import host_launcher_here, preloaded
from support.on_hosts import WAIT_S, await_gone

import oneaccord as oa
from oneaccord.engines import host_workers, workers

LONG_S = 120.0


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(host_launcher_here.install(tmp_path / "plugin"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("ONEACCORD_BACKEND", "tcp")
    monkeypatch.setenv("HERE_PYTHON", str(preloaded.stand_in(tmp_path / "python")))


def adds(group: oa.Group, value: float) -> tuple[int, float]:
    print(f"here is {group.rank}")
    return group.rank, float(group.all_reduce(np.array([value]))[0])


def fails(group: oa.Group) -> None:
    if group.rank == 2:
        raise KeyError("gone")
    group.barrier()


def dies(group: oa.Group) -> None:
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


def loops(group: oa.Group, folder: str) -> None:
    (Path(folder) / f"rank-{group.rank}").write_text(str(os.getpid()))
    while True:
        group.barrier(timeout_s=LONG_S)


def pids_in(folder: Path, count: int) -> list[int]:
    until = time.monotonic() + WAIT_S
    while True:
        found = [path.read_text() for path in folder.glob("rank-*")]
        if len(found) == count and all(found):
            return [int(text) for text in found]
        assert time.monotonic() < until, found
        time.sleep(0.02)


def test_launch_on_hosts_returns_results_and_output(capsys: pytest.CaptureFixture[str]) -> None:
    found = oa.launch(adds, 3, on="here", args=(2.0,), timeout_s=LONG_S)
    assert found == [(rank, 6.0) for rank in range(3)]
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"[{rank}] here is {rank}" for rank in range(3)]
    assert err == ""


def test_launch_on_hosts_takes_large_arguments() -> None:
    data = np.arange(1 << 20)
    found = oa.launch(echoes, 3, on="here", args=(data,), timeout_s=LONG_S)
    assert all(np.array_equal(each, data) for each in found)


def echoes(group: oa.Group, data: np.ndarray) -> np.ndarray:
    return data


def test_launch_on_hosts_raises_the_first_cause_with_its_host() -> None:
    with pytest.raises(KeyError, match="gone") as caught:
        oa.launch(fails, 3, on="here", timeout_s=LONG_S)
    assert caught.value.__notes__[0].startswith("raised by fails() on rank 2 of 3 on 127.0.0.6; then also: rank 0")


def test_launch_on_hosts_names_a_killed_rank() -> None:
    with pytest.raises(oa.errors.RankError, match=r"rank 2 of 3 on 127.0.0.6 was lost: killed by SIGKILL"):
        oa.launch(dies, 3, on="here", timeout_s=LONG_S)


def test_launch_on_hosts_names_a_lost_host(tmp_path: Path) -> None:
    shell = f'echo $$ > "{tmp_path}/agent-$0"; exec "$@"'
    job = oa.launch_async(loops, 4, on="here", args=(str(tmp_path),), timeout_s=LONG_S, options={"shell": shell})
    pids = pids_in(tmp_path, 4)
    os.kill(int((tmp_path / "agent-127.0.0.6").read_text()), signal.SIGKILL)
    with pytest.raises(oa.errors.RankError, match=r"its host 127.0.0.6 was lost: sh ended \(killed by SIGKILL\)"):
        job.results()
    await_gone(pids)


def test_ranks_on_a_host_that_hangs_miss_their_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERE_PYTHON")  # a stand-in stands still alone
    monkeypatch.setattr(host_workers, "_END_S", 0.5)
    monkeypatch.setattr(workers, "_REVOKE_S", 0.5)
    shell = f'echo $$ > "{tmp_path}/agent-$0"; exec "$@"'
    with oa.Ranks(4, on="here", options={"shell": shell, "grace_s": 0.5}) as ranks:
        assert len(ranks.run(adds, 1.0)) == 4
        os.kill(int((tmp_path / "agent-127.0.0.6").read_text()), signal.SIGSTOP)
        with pytest.raises(oa.DeadlineError):
            ranks.run(echoes, np.arange(1 << 20), timeout_s=1.0)  # more than the pipe takes


def variables(group: oa.Group, *names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_launch_on_hosts_passes_variables_that_tune_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "MY_FLAG", "LEFT"):
        monkeypatch.setenv(name, "set here")
    options = {"shell": 'exec env -u NCCL_DEBUG -u MY_FLAG -u LEFT "$@"', "environ": {"MY_FLAG": "given"}}
    found = oa.launch(variables, 3, on="here", args=("NCCL_DEBUG", "MY_FLAG", "LEFT"), timeout_s=LONG_S, options=options)
    assert found == [["set here", "given", None]] * 3


def test_launch_on_hosts_cancel_ends_all(tmp_path: Path) -> None:
    job = oa.launch_async(loops, 4, on="here", args=(str(tmp_path),))
    pids = pids_in(tmp_path, 4)
    job.cancel()
    with pytest.raises(oa.errors.AbortedError):
        job.results()
    await_gone(pids)


def test_launch_on_hosts_killed_program_leaves_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import oneaccord as oa, test_launch_on_hosts as t\n"
        f"oa.launch(t.loops, 4, on='here', args=({str(tmp_path)!r},))\n"
    )
    process = preloaded.Popen([sys.executable, str(program)], cwd=tmp_path)
    pids = pids_in(tmp_path, 4)
    process.kill()
    process.wait()
    await_gone(pids)


def test_launch_on_hosts_that_are_too_few_is_refused() -> None:
    with pytest.raises(oa.errors.UsageError, match="5 ranks do not fit"):
        oa.launch(fails, 5, on="here", timeout_s=LONG_S)


@pytest.mark.parametrize("on", ["local", "here"])
def test_launch_max_restarts_is_refused(on: str) -> None:
    with pytest.raises(oa.errors.UsageError, match=r"replace no ranks.*oneaccord run --max-restarts N"):
        oa.launch(fails, 2, on=on, timeout_s=LONG_S, options={"max_restarts": 1})


def test_ranks_on_hosts_stay_warm() -> None:
    with oa.Ranks(3, on="here") as ranks:
        assert ranks.run(adds, 1.0) == [(rank, 3.0) for rank in range(3)]
        assert ranks.run(adds, 2.0) == [(rank, 6.0) for rank in range(3)]
