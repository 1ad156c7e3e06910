"""The plugin of pytest: the fixture ``world``, the option ``--oneaccord-seed``, and what people see when a test fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import preloaded

SAMPLE = """\
import numpy as np
import pytest
import oneaccord as oa

broken, internal, refused = {}, {}, {}
exec("def call(): raise KeyError('a bug')", {"__name__": "oneaccord.broken"}, broken)
exec("def call(): raise oneaccord.errors.InternalError('a bug')", {"__name__": "oneaccord.x", "oneaccord": oa}, internal)
exec("def call(): raise oneaccord.errors.UsageError('a word')", {"__name__": "oneaccord.x", "oneaccord": oa}, refused)

def train(group, expected=7):
    total = group.all_reduce(np.ones(3))
    if group.rank == 1:
        assert total.sum() == expected
    group.barrier()

def crossed(group):
    group.recv(1 - group.rank)

def kth(group, calls, k):
    calls.append(group.rank)
    if len(calls) == k:
        raise RuntimeError("too often")

def translated(group):
    try:
        crossed(group)
    except oa.DeadlockError as error:
        raise ValueError("mine") from error

def raised(error):
    raise error

def test_fine(world):
    run = world(2).run(train, expected=6)
    assert (run.results, run.seed, run.world_size) == ([None, None], 0, 2)

def test_wrong(world):
    world(2).run(train)

def test_wrong_with_arguments(world):
    world(2).run(train, 8, seed=3)

def test_deadlock(world):
    world(2).run(crossed)

def test_chain(world):
    world(2).run(translated)

def test_outside(world):
    run = world(2).run(lambda group: group.rank)
    assert run.results == [0, 2]

def test_bug(world):
    world(1).run(lambda group: broken["call"]())

def test_internal(world):
    world(1).run(lambda group: internal["call"]())

def test_refused(world):
    world(1).run(lambda group: refused["call"]())

def test_no_world(world):
    world(0).run(train)

def test_explore(world):
    world(1).explore(kth, [], 4)

def test_unused(world):
    assert not world

def test_skipped(world):
    world(2).run(lambda group: pytest.skip("not here"))

@pytest.mark.xfail(raises=oa.DeadlockError, strict=True)
def test_xfail(world):
    world(2).run(crossed)

@pytest.mark.parametrize("what", ["a b"])
def test_parameter(world, what):
    world(2).run(train)

def test_prints(world, capsys):
    world(2).run(lambda group: (print("rank", group.rank), group.barrier(), print("done")))
    said = capsys.readouterr().out.splitlines()
    assert (sorted(said[:2]), said[2:]) == (["rank 0", "rank 1"], ["done"] * 2)

def test_steps(world):
    def train(group):
        for step in range(3):
            group.mark(f"step {step}")
            for _ in range(1 + step):
                group.all_reduce(np.ones(4))

    trace = world(2).run(train).trace
    trace.assert_at_most(3, "all_reduce", per="step")
    trace.assert_bytes_sent_at_most(6 * 32)
    with pytest.raises(AssertionError, match="but at most 191 is allowed"):
        trace.assert_bytes_sent_at_most(6 * 32 - 1)
    trace.assert_at_most(2, "all_reduce", per="step")
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, as if nobody ran these tests."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    words = ["-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return preloaded.run(words, cwd=folder, environ=environment, modules=preloaded.OF_PYTEST)


def blocks(output: str) -> dict[str, list[str]]:
    """Return the lines that pytest shows for each test that failed, by its name."""
    parts = re.split(
        r"^_{5,} (\S+?(?:\[.*\])?) _{5,}$", output.partition("= FAILURES =")[2].partition("= short test")[0], flags=re.MULTILINE
    )
    return {name: text.splitlines() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def errors(lines: list[str]) -> list[str]:
    """Return what went wrong, as pytest says it, without addresses of memory."""
    return [re.sub("0x[0-9a-f]+", "0x", line[1:].strip()) for line in lines if re.match(r"E\s", line)]


def places(lines: list[str]) -> list[str]:
    """Return where the lines of the traceback stand, in their order."""
    return [line.strip() for line in lines if re.match(r"\S+:\d+:", line)]


def at(text: str, what: str = "") -> str:
    """Return how pytest names the first line of the sample that has this text."""
    return f"test_it.py:{SAMPLE[: SAMPLE.index(text)].count(chr(10)) + 1}: {what}".strip()


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    (folder / "test_it.py").write_text(SAMPLE)
    return folder


@pytest.fixture(scope="module")
def done(sample):
    return run_pytest(sample)


@pytest.fixture(scope="module")
def shown(done):
    return blocks(done.stdout)


# What is shown


def test_what_should_fail_does_and_nothing_else(done, shown):
    passed = {"test_fine", "test_skipped", "test_xfail", "test_prints"}
    names = re.findall(r"^def (test_\w+)", SAMPLE, flags=re.MULTILINE)
    assert {name.partition("[")[0] for name in shown} == set(names) - passed
    assert f" {len(names) - 4} failed, 2 passed, 1 skipped, 1 xfailed in " in done.stdout.splitlines()[-1]


def test_an_assertion_on_a_rank_reads_like_any_other(shown):
    lines = shown["test_wrong"]
    assert errors(lines) == [
        f"assert {np.float64(6.0)!r} == 7",
        f"+  where {np.float64(6.0)!r} = <built-in method sum of numpy.ndarray object at 0x>()",
        "+    where <built-in method sum of numpy.ndarray object at 0x> = array([2., 2., 2.]).sum",
        "raised on rank 1 of 2, in a simulated world of seed 0",
        "repeat with: pytest test_it.py::test_wrong --oneaccord-seed=0",
    ]
    assert places(lines) == [at("world(2).run(train)\n"), at("assert total.sum()", "AssertionError")]
    assert ">   world(2).run(train)" in [re.sub(" +", " " * 3, line) for line in lines]
    assert "world = <worlds of simulated ranks>" in lines


def test_where_the_test_gives_the_seed_the_option_is_not_needed(shown):
    assert errors(shown["test_wrong_with_arguments"])[0] == f"assert {np.float64(6.0)!r} == 8"
    assert errors(shown["test_wrong_with_arguments"])[-2:] == [
        "raised on rank 1 of 2, in a simulated world of seed 3",
        "repeat with: pytest test_it.py::test_wrong_with_arguments",
    ]


def test_a_deadlock_is_told_in_full_and_once(shown):
    lines = shown["test_deadlock"]
    where = at("group.recv(1 - group.rank)").rstrip(":")
    told = errors(lines)
    assert len(told) == 5
    assert told[0].startswith("oneaccord.errors.DeadlockError: deadlock: no rank can go on: ")
    assert told[1].startswith(f"rank 0: recv from rank 1 #1 at {where}, ")
    assert told[2].startswith(f"rank 1: recv from rank 0 #1 at {where}, ")
    assert told[4] == "repeat with: pytest test_it.py::test_deadlock --oneaccord-seed=0"
    assert re.fullmatch("raised on rank [01] of 2, in a simulated world of seed 0", told[3])
    assert places(lines) == [at("world(2).run(crossed)"), at("group.recv(1 - group.rank)", "DeadlockError")]
    assert "\n".join(lines).count("no rank can go on") == 1


def test_errors_that_led_to_the_last_one_are_shown_as_short(shown):
    lines = shown["test_chain"]
    assert places(lines) == [
        at("crossed(group)\n    except"),
        at("group.recv(1 - group.rank)", "DeadlockError"),
        at("world(2).run(translated)"),
        at('raise ValueError("mine")', "ValueError"),
    ]
    assert errors(lines)[-3] == "ValueError: mine"


def test_how_to_repeat_is_told_of_failures_outside_of_ranks_too(shown):
    assert errors(shown["test_outside"])[-1] == "repeat with: pytest test_it.py::test_outside --oneaccord-seed=0"
    assert (
        errors(shown["test_parameter[a b]"])[-1] == "repeat with: pytest 'test_it.py::test_parameter[a b]' --oneaccord-seed=0"
    )
    assert not any("repeat with" in line for line in shown["test_unused"])


def test_only_an_error_that_may_be_a_bug_of_oneaccord_shows_its_lines(shown):
    call = at("lambda group: broken")
    assert places(shown["test_bug"]) == [call, f"{call} in <lambda>", "<string>:1: KeyError"]
    call = at("lambda group: internal")
    assert places(shown["test_internal"]) == [call, f"{call} in <lambda>", "<string>:1: InternalError"]
    call = at("lambda group: refused")
    assert places(shown["test_refused"]) == [call, f"{call} UsageError"]
    assert places(shown["test_no_world"]) == [at("world(0)", "InvalidWorldSizeError")]


def test_an_exploration_fails_its_test_with_a_report(shown):
    lines = shown["test_explore"]
    assert errors(lines) == [
        "RuntimeError: too often",
        "raised on rank 0 of 1, in a simulated world of seed 3",
        "lambda group: kth(group, [], 4): 3 seeds passed, seed 3 failed on rank 0 of 1",
        "the end of its trace:",
        "1 rank, seed 3, 0.000000 s",
        "0.000000 s  rank 0  ended",
        "repeat with: run(lambda group: kth(group, [], 4), 1, seed=3)",
        "repeat with: pytest test_it.py::test_explore --oneaccord-seed=3",
    ]
    assert places(lines) == [at("world(1).explore(kth"), at("raise RuntimeError", "RuntimeError")]


def test_assertions_on_the_trace_point_at_the_test(shown):
    lines = shown["test_steps"]
    call = at("group.all_reduce(np.ones(4))").rstrip(":")
    mark = '(the mark "step 2" at 0.000000 s)'
    assert errors(lines)[:4] == [
        f"AssertionError: rank 0 called all_reduce 3 times in step 2 {mark}, but at most 2 is allowed; the calls:",
        *(f'0.000000 s  all_reduce #{number} (float64[4], op="sum")  at {call}' for number in (3, 4, 5)),
    ]
    assert places(lines) == [at("assert_at_most(2", "AssertionError")]


def test_all_lines_are_shown_where_they_are_asked_for(sample):
    text = run_pytest(sample, "-k", "test_deadlock", "--full-trace").stdout
    assert "oneaccord_simulated/running.py" in text
    assert "repeat with: pytest test_it.py::test_deadlock --oneaccord-seed=0" in text


# The option


def test_the_seed_of_the_command_line_is_that_of_worlds_whose_test_gives_none(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "def test_it(world):\n"
        "    assert world(1).run(lambda group: group.rank).seed == 7\n"
        "    assert world(1).run(lambda group: group.rank, seed=8).seed == 8\n"
        "    plans = []\n"
        "    world(1, faults=lambda seed: plans.append(seed)).run(lambda group: group.rank)\n"
        "    assert plans == [7]\n"
        "    tried = []\n"
        "    done = world(1).explore(lambda group: None, seeds=[3, 5, 7, 9], check=lambda run: tried.append(run.seed))\n"
        "    assert (tried, done.seeds_run) == ([3, 7, 5, 9], 4)\n"
        "    tried = []\n"
        "    world(1).explore(lambda group: None, seeds=iter([7, 8]), check=lambda run: tried.append(run.seed))\n"
        "    assert tried == [7, 8]\n"
    )
    done = run_pytest(tmp_path, "--oneaccord-seed=7")
    assert done.returncode == 0, done.stdout
    assert "\noneaccord: seed 7\n" in done.stdout
    for wrong in ("-1", "1.5", "x", "²"):
        refused = run_pytest(tmp_path, f"--oneaccord-seed={wrong}")
        assert refused.returncode == pytest.ExitCode.USAGE_ERROR
        assert f"{wrong!r} is not a seed: expected an integer, 0 or more" in refused.stderr


def test_what_an_exploration_found_fails_again_by_the_line_that_is_told(tmp_path):
    """Also where results are compared with those of the first seed, and from another working directory."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "test_it.py").write_text(
        "order, tried = [], []\n"
        "def program(group):\n"
        "    if group.rank == 0: order.clear()\n"
        "    group.barrier()\n"
        "    order.append(group.rank)\n"
        "    group.barrier()\n"
        "    return list(order)\n"
        "def test_it(world):\n"
        "    try:\n"
        "        world(3).explore(program, seeds=range(5, 90), alike=True, check=lambda run: tried.append(run.seed))\n"
        "    finally:\n"
        "        print('tried', tried)\n"
    )
    first = run_pytest(tmp_path, "--rootdir=sub", "sub").stdout
    told = re.search(r"repeat with: pytest (\S+) (\S+)\n", first)
    assert told[1] == "sub/test_it.py::test_it"
    seed = int(told[2].removeprefix("--oneaccord-seed="))
    assert seed > 5
    again = run_pytest(tmp_path, told[1], told[2]).stdout
    assert f"seed {seed} gives other results than seed 5" in first
    assert f"seed {seed} gives other results than seed 5" in again
    assert f"tried [5, {seed}]" in again


# The fixture


def test_a_world_has_defaults_that_a_run_can_change(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "import oneaccord as oa\n"
        "from oneaccord_simulated import Kill\n"
        "def test_it(world):\n"
        "    mine = world(2, network='textbook', faults=Kill(rank=1, operation='barrier'), timeout_s=5, config={'reproducible': True})\n"
        "    assert repr(mine) == '<world of 2 simulated ranks>'\n"
        "    run = mine.run(lambda group, word, times: word * times, 'a', times=3)\n"
        "    assert run.results == ['aaa', 'aaa']\n"
        "    fast = mine.run(lambda group: group.sendrecv(1.0, 1 - group.rank, 1 - group.rank))\n"
        "    slow = mine.run(lambda group: group.sendrecv(1.0, 1 - group.rank, 1 - group.rank), network='laptop')\n"
        "    assert 0 < fast.duration_s < slow.duration_s\n"
        "    waits = lambda group: group.recv(1) if group.rank == 0 else group.compute(100)\n"
        "    for timeout_s in (None, 3):\n"
        "        with pytest.raises(oa.DeadlineError, match=f'within {timeout_s or 5} s'):\n"
        "            mine.run(waits, timeout_s=timeout_s)\n"
        "    killed = mine.run(lambda group: group.barrier(), check=False)\n"
        "    assert type(killed.cause) is oa.PeerLostError\n"
        "    killed = mine.run(waits, faults=Kill(rank=1, at_s=1), check=False)\n"
        "    assert type(killed.cause) is oa.PeerLostError\n"
        "    with pytest.raises(oa.ConfigError, match='timeout'):\n"
        "        mine.run(waits, config={'timeout': 1})\n"
        "    assert mine.explore(waits, seeds=range(3), expected=oa.DeadlineError).seeds_run == 3\n"
        "    with pytest.raises(oa.DeadlineError, match='within 2 s'):\n"
        "        mine.explore(waits, timeout_s=2)\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout


def test_a_fixture_of_that_name_in_a_project_goes_before_this_one(tmp_path):
    (tmp_path / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef world():\n    return 'mine'\n")
    (tmp_path / "test_it.py").write_text("def test_it(world):\n    assert world == 'yours'\n")
    text = run_pytest(tmp_path).stdout
    assert "AssertionError: assert 'mine' == 'yours'" in text.replace("E       assert", "E       AssertionError: assert")
    assert "repeat with" not in text


@pytest.mark.long
def test_it_works_on_the_workers_of_xdist(sample):
    done = run_pytest(sample, "-n", "1", "-k", "test_wrong or test_prints", "--oneaccord-seed=4")
    assert " 2 failed, 1 passed in " in done.stdout
    assert "raised on rank 1 of 2, in a simulated world of seed 4" in done.stdout
    assert "repeat with: pytest test_it.py::test_wrong --oneaccord-seed=4" in done.stdout


# What it costs those who do not use it


def test_an_unused_plugin_loads_nothing(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    program = (
        "import sys, pytest\n"
        "pytest.main(['-p', 'oneaccord_simulated.pytest_plugin', '-p', 'no:cacheprovider'])\n"
        "tops = {name for name in sys.modules if name.partition('.')[0] in {'numpy', 'pydantic', 'oneaccord', 'oneaccord_simulated'}}\n"
        "print(*sorted(tops))\n"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=True
    )
    assert " 1 passed in " in done.stdout
    assert done.stdout.splitlines()[-1] == "oneaccord_simulated oneaccord_simulated.pytest_plugin"


def test_pytest_finds_it_by_itself_and_can_be_told_not_to(tmp_path):
    assert "--oneaccord-seed=N" in run_pytest(tmp_path, "--help").stdout
    assert "--oneaccord-seed=N" not in run_pytest(tmp_path, "-p", "no:oneaccord_simulated", "--help").stdout
