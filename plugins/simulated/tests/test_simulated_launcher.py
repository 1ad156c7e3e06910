"""``oneaccord run --backend simulated``: an unchanged script, on the ranks of a simulated world."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from support import preloaded

from oneaccord.api import LaunchRequest
from oneaccord_simulated.plugin import SimulatedConfig
from oneaccord_simulated.script import launcher

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run a script as four ranks; the arguments are those before and after the script, and keys of the backend's table."""

    def run(
        source: str, *args: str, options: tuple[str, ...] = (), target: tuple[str, ...] = ("script.py",), **config: object
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(textwrap.dedent(source))
        table = {f"ONEACCORD_BACKENDS__SIMULATED__{key.upper()}": str(value) for key, value in config.items()}
        return preloaded.run(command(options, target, args)[1:], cwd=tmp_path, environ=os.environ | table)

    return run


def command(options: tuple[str, ...] = (), target: tuple[str, ...] = ("script.py",), args: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "oneaccord", "run", "-n", "4", "--backend", "simulated", *options, *target, *args]


def test_an_unchanged_script_has_globals_arguments_and_a_prefix_of_its_own_on_each_rank(launch):
    done = launch(
        """
        import sys
        import oneaccord as oa

        mine = []

        def add(value):
            global mine
            mine = [*mine, value]

        class Thing:
            pass

        if __name__ == "__main__":
            with oa.init() as group:
                group.barrier()
                add(group.rank)
                group.barrier()
                assert mine == [group.rank]
                assert Thing.__module__ == "__main__"
                total = group.all_reduce(group.rank).item()
                print(group.rank, group.world_size, group.backend_name, total, sys.argv, __file__.endswith("script.py"))
        """,
        "--one",
        "two",
        "-n",
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = [f"[{rank}] {rank} 4 simulated 6 ['script.py', '--one', 'two', '-n'] True" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == expected


def test_lines_stay_whole_and_those_without_an_end_are_shown(launch):
    done = launch(
        """
        import sys
        import oneaccord as oa

        with oa.init() as group:
            for number in range(50):
                print("line", number, end=" ")
                print("of", group.rank)
            print("error", file=sys.stderr)
            print("bar", end="\\r")
            print()
            print()
            print("rest", end="")
        """
    )
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [
            *[f"[{rank}] line {number} of {rank}" for number in range(50)],
            f"[{rank}] bar",
            f"[{rank}] ",
            f"[{rank}] rest",
        ]
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] error" for rank in range(4)]


def test_a_line_does_not_overwrite_the_bar_of_another_rank(tmp_path):
    steps = ((0, r"sys.stdout.write('50 %\r')"), (1, "print('hello')"), (0, "print('100 %')"))
    lines = [f"    if group.rank == {rank}:\n        {step}\n    group.barrier()" for rank, step in steps]
    (tmp_path / "script.py").write_text("\n".join(["import sys, oneaccord as oa", "with oa.init() as group:", *lines]))
    done = subprocess.run(command(), cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"[0] 50 %\r\n[1] hello\n[0] 100 %\n"


def test_no_prefix(launch):
    source = "import sys\nimport oneaccord as oa\nwith oa.init() as g:\n    sys.stdout.write('hello\\n')"
    done = launch(source, options=("--no-prefix",))
    assert (done.returncode, done.stdout) == (0, "hello\n" * 4)


def test_a_module_and_a_package(launch, tmp_path):
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "from . import other\nimport sys\nimport oneaccord as oa\nassert sys.argv == [__file__]\n"
        "with oa.init() as g:\n    print(other.NAME, __name__, g.rank)\n"
    )
    (package / "other.py").write_text("NAME = 'relative'\n")
    done = launch("", target=("-m", "tool"))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] relative __main__ {rank}" for rank in range(4)]
    done = launch("import oneaccord as oa\nwith oa.init() as g:\n    print(g.rank)", target=("-m", "script"))
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank}" for rank in range(4)]


def test_imports_from_beside_the_script(launch, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "program.py").write_text("import beside\nprint(beside.NAME)\n")
    (tmp_path / "sub" / "beside.py").write_text("NAME = 'found'\n")
    done = launch("", target=("sub/program.py",))
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] found" for rank in range(4)]


def test_each_rank_has_the_modules_of_the_program_for_itself(launch, tmp_path):
    (tmp_path / "comm.py").write_text(
        "import oneaccord as oa\ngroup = oa.init()\n"
    )  # which waits for the others, while it is imported
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("from . import state\n")
    (tmp_path / "pack" / "state.py").write_text("seen = []\n")
    (tmp_path / "late.py").write_text("import comm\nrank = comm.group.rank\n")
    done = launch(
        """
        import comm
        import pack.state

        pack.state.seen.append(comm.group.rank)
        comm.group.barrier()
        import late

        print(comm.group.all_reduce(comm.group.rank), pack.state.seen, late.rank)
        comm.group.close()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] 6 [{rank}] {rank}" for rank in range(4)]


@pytest.mark.parametrize("before", [True, False], ids=["before init", "in the group"])
def test_the_first_failing_rank_is_shown_last_and_decides_the_exit_code(launch, before):
    where = "early" if before else "late"
    done = launch(
        f"""
        import oneaccord as oa
        from oneaccord.api import current_rank

        def broken():
            raise KeyError("mine")

        if {before} and current_rank() == 2:
            broken()  # early
        with oa.init() as group:
            if group.rank == 2:
                broken()  # late
            group.barrier()
        """
    )
    assert done.returncode == 1
    tail = done.stderr[done.stderr.index("rank 2 failed first:") :]
    assert "KeyError: 'mine'" in tail
    assert f"broken()  # {where}" in tail
    assert tail.count("Traceback") == 1
    assert "raised on rank 2 of 4" in tail


def test_sys_exit_decides_the_exit_code(launch):
    source = """
        import sys
        import oneaccord as oa

        with oa.init() as group:
            if group.rank == 1:
                sys.exit({})
            group.barrier()
        """
    assert launch(source.format("7")).returncode == 7
    done = launch(source.format("'in words'"))
    assert done.returncode == 1
    assert "in words" in done.stderr
    source = "import sys\nimport oneaccord as oa\nwith oa.init() as g:\n    g.barrier()\nsys.exit(0)"
    assert launch(source).returncode == 0


def test_a_rank_that_fails_between_two_groups_stops_the_others(launch):
    done = launch(
        """
        import oneaccord as oa

        with oa.init() as group:
            group.barrier()
        if group.rank == 1:
            raise KeyError("between")
        try:
            with oa.init() as group:
                group.barrier()
        except oa.AbortedError as error:
            print("stopped:", error)
            raise
        """
    )
    assert done.returncode == 1
    assert "rank 1 failed first" in done.stderr
    assert sorted(line[:12] for line in done.stdout.splitlines()) == ["[0] stopped:", "[2] stopped:", "[3] stopped:"]


def test_a_script_that_is_not_there(launch):
    done = launch("", target=("missing.py",))
    assert done.returncode != 0
    assert "missing.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_config_file_counts(launch, tmp_path):
    source = """
        import oneaccord as oa

        with oa.init() as group:
            if group.rank == 0:
                oa.sleep(1)
            group.barrier()
        """
    assert launch(source).returncode == 0
    (tmp_path / "oneaccord.toml").write_text("timeout_s = 0.2\n")
    done = launch(source)
    assert done.returncode == 1
    assert "barrier #0 did not finish within 0.2 s" in done.stderr
    assert done.stderr.count("Traceback") == 1


def test_each_rank_has_a_main_module_streams_and_variables_of_its_own(launch):
    done = launch(
        """
        import contextlib, io, os, pickle, subprocess, sys
        from dataclasses import dataclass
        import __main__
        import oneaccord as oa

        @dataclass
        class Thing:
            value: "int"

        def check(rank):
            assert sys.modules["__main__"] is __main__ and __main__.Thing is Thing
            assert type(pickle.loads(pickle.dumps(Thing(rank)))) is Thing
            assert sys.argv == ["script.py", "one", str(rank)]
            assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == os.environ["MINE"] == str(rank)
            assert ("HOME" in os.environ) == (rank != 0)

        with oa.init() as group:
            rank = group.rank
            assert os.getenv("WORLD_SIZE") == os.getenv("LOCAL_WORLD_SIZE") == "4" and os.environ["GROUP_RANK"] == "0"
            assert subprocess.check_output(["sh", "-c", "echo $RANK"], text=True) == f"{rank}\\n"
            group.barrier()
            sys.argv.append(str(rank))
            os.environ["MINE"] = str(rank)
            if rank == 0:
                del os.environ["HOME"]
            captured = io.StringIO()
            with contextlib.redirect_stdout(captured) if rank == 1 else contextlib.nullcontext():
                for number in range(3):
                    group.barrier()
                    print("shown", number)
                    check(rank)
            if rank == 2:
                sys.stdout.detach()
            group.barrier()
            if rank != 2:
                sys.stdout.buffer.write(b"bytes \\xff\\n")
            assert captured.getvalue() == ("shown 0\\nshown 1\\nshown 2\\n" if rank == 1 else "")
        """,
        "one",
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = {rank: [line[4:] for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")] for rank in range(4)}
    three = ["shown 0", "shown 1", "shown 2"]
    assert shown == {0: [*three, "bytes \\xff"], 1: ["bytes \\xff"], 2: three, 3: [*three, "bytes \\xff"]}


def test_a_logging_handler_that_one_rank_made_tells_who_logs(launch):
    done = launch(
        """
        import logging
        import oneaccord as oa

        logging.basicConfig(format="%(message)s")
        with oa.init() as group:
            logging.warning("rank %d", group.rank)
        """
    )
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] rank {rank}" for rank in range(4)]


def test_the_ranks_of_a_network_have_local_ranks(launch, tmp_path):
    (tmp_path / "net.toml").write_text(
        'topology = "wires"\nranks_per_host = 3\n[wire]\nlatency_s = 1e-6\nbandwidth_bytes_per_s = 1e9\n'
    )
    names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK"
    done = launch(
        f"import os\nprint(*(os.environ[name] for name in '{names}'.split()))", options=("--no-prefix",), network="net.toml"
    )
    assert sorted(done.stdout.splitlines()) == ["0 0 3 0", "1 1 3 0", "2 2 3 0", "3 0 1 1"]


TALKS = """
    import numpy as np
    import oneaccord as oa

    with oa.init() as group:
        for step in range(5):
            group.barrier()
            print("step", step)
        group.all_reduce(np.ones(100_000))
        oa.sleep(0.25)
    """


def test_the_same_seed_gives_the_same_output_and_trace_and_another_one_another_order(launch, tmp_path):
    outputs, traces = [], []
    for seed in (7, 7, 8):
        done = launch(TALKS, seed=seed, trace="trace.json", network="fat-tree")
        assert done.returncode == 0
        assert done.stderr.startswith("oneaccord run: the trace is in trace.json (0.25")
        assert done.stderr.endswith(" virtual seconds); open it at ui.perfetto.dev\n")
        outputs.append(done.stdout)
        traces.append((tmp_path / "trace.json").read_bytes())
    assert outputs[0] == outputs[1] != outputs[2]
    assert traces[0] == traces[1]
    assert sorted(outputs[0].splitlines()) == sorted(outputs[2].splitlines())


def test_a_network_makes_time_pass(launch, tmp_path):
    def duration(**config: object) -> float:
        done = launch(TALKS, trace="trace.json", **config)
        assert done.returncode == 0
        assert {"all_reduce", "message"} <= {
            event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        }
        return float(done.stderr.partition("(")[2].partition(" virtual")[0])

    assert duration() == 0.25
    assert duration(network="fat-tree") > 0.25


def test_a_deadlock_is_told_once_with_the_line_of_each_rank(launch, tmp_path):
    done = launch(
        """
        import oneaccord as oa

        def wait(group):
            group.recv((group.rank + 1) % 4)

        with oa.init() as group:
            if group.rank == 3:
                group.recv(0)
            wait(group)
        """,
        seed=7,
        trace="trace.json",
    )
    assert done.returncode == 1
    trace_line, rule, first, repeat, *rest = done.stderr.splitlines()
    assert trace_line.startswith("oneaccord run: the trace is in trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert rule == "-" * 80
    assert first.endswith(" failed first: exit code 1 (simulated world, seed 7)")
    assert repeat == "oneaccord run: to repeat it, set ONEACCORD_BACKENDS__SIMULATED__SEED=7"
    text = "\n".join(rest)
    for rank, line in {0: 5, 1: 5, 2: 5, 3: 9}.items():
        assert text.count(f"rank {rank}: recv from rank {(rank + 1) % 4} #1 at script.py:{line},") == 1
    assert text.count("DeadlockError") == text.count("Traceback") == 1
    assert {line.split('"')[1] for line in rest if line.startswith("  File")} == {str(tmp_path / "script.py")}


def test_a_mismatch_is_told_with_the_line_of_each_rank(launch):
    done = launch(
        """
        import oneaccord as oa

        with oa.init() as group:
            if group.rank == 2:
                group.broadcast(1.0)
            else:
                group.all_reduce(1.0)
        """
    )
    assert done.returncode == 1
    assert done.stderr.count("CollectiveMismatchError") == 1
    assert "rank 2: broadcast(float64[], root=0) #0 at script.py:6" in done.stderr
    assert "at script.py:8" in done.stderr
    assert "oneaccord/" not in done.stderr
    assert "oneaccord_simulated" not in done.stderr


def test_eager_bytes_lets_small_sends_pass(launch):
    source = """
        import oneaccord as oa

        with oa.init() as group:
            group.send(1.0, (group.rank + 1) % 4)
            group.recv((group.rank - 1) % 4)
        """
    assert "backends.simulated.eager_bytes" in launch(source).stderr
    done = launch(source, eager_bytes=4096)
    assert (done.returncode, done.stderr) == (0, "")


KILL = '[[kill]]\nrank = 2\noperation = "barrier"\nnth = 1\n'
KILLED = """
    import sys
    import oneaccord as oa

    try:
        with oa.init() as group:
            group.barrier()
            oa.sleep(0.5)
            group.barrier()
    except oa.PeerLostError:
        sys.exit(int(sys.argv[1]))
    finally:
        print("over")
    """


@pytest.mark.parametrize(("own", "code"), [(0, 137), (9, 9)])
def test_a_rank_that_the_fault_plan_kills(launch, tmp_path, own, code):
    (tmp_path / "plan.toml").write_text(KILL)
    done = launch(KILLED, str(own), faults="plan.toml", seed=3)
    assert done.returncode == code
    assert sorted(done.stdout.splitlines()) == ["[0] over", "[1] over", "[3] over"]
    _, killed, ended, *_ = done.stderr.splitlines()
    assert killed == "oneaccord run: rank 2 was killed by the fault plan at barrier #1, after 0.5 virtual seconds"
    assert ended.endswith(f"exit code {code} (simulated world, seed 3)")
    assert (" failed first: " in ended) == (own != 0)


def test_a_rank_that_stands_still_for_ever(launch, tmp_path):
    (tmp_path / "plan.toml").write_text('[[pause]]\nrank = 1\noperation = "sleep"\n')
    done = launch("import oneaccord as oa\nwith oa.init() as g:\n    pass\noa.sleep(1)\nprint('over')", faults="plan.toml")
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["[0] over", "[2] over", "[3] over"]
    assert "rank 1 had not ended when nothing could happen any more" in done.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"faults": "none.toml"}, "none.toml"),
        ({"faults": "far.toml"}, "a world of 4 has no rank 9"),
        ({"network": "fat-tre"}, "did you mean 'fat-tree'"),
        ({"trace": "nowhere/trace.json"}, "backends.simulated.trace = 'nowhere/trace.json'"),
        ({"seed": -1}, "backends.simulated.seed"),
    ],
)
def test_a_config_that_describes_no_world(launch, tmp_path, config, words):
    (tmp_path / "far.toml").write_text("[[kill]]\nrank = 9\nat_s = 1.0\n")
    done = launch("print('never')", **config)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_no_program_is_the_failure_of_a_rank(launch):
    done = launch("def f(:")
    assert done.returncode == 1
    assert 'script.py", line 1' in done.stderr
    assert "SyntaxError" in done.stderr
    assert "oneaccord_simulated" not in done.stderr
    assert launch("", target=("-m", "script.nothing")).returncode == 1


def test_an_error_out_of_a_library_keeps_its_calls_and_what_led_to_it(launch):
    done = launch(
        """
        import json
        import oneaccord as oa

        with oa.init() as group:
            try:
                group.recv((group.rank + 1) % 4)
            except oa.DeadlockError:
                if group.rank == 1:
                    json.loads("{")
        """
    )
    assert done.returncode == 1
    assert "rank 1 failed first" in done.stderr
    assert "in raw_decode" in done.stderr or "in decode" in done.stderr
    assert done.stderr.count("Traceback") == 2
    assert "During handling of the above exception" in done.stderr
    assert "oneaccord_simulated" not in done.stderr


def test_nobody_reads_any_more(launch, tmp_path):
    (tmp_path / "script.py").write_text(
        "import oneaccord as oa\nwith oa.init() as g:\n    while True:\n        g.barrier()\n        print('line')\n"
    )
    process = subprocess.Popen(command(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(20) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_rank(tmp_path, number):
    (tmp_path / "oneaccord.toml").write_text('[backends.simulated]\ntrace = "trace.json"\n')
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import time
            import oneaccord as oa

            with oa.init() as group:
                group.barrier()
                if group.rank == 0:
                    print("waiting")
                while True:
                    time.sleep(0.2)
                    group.barrier()
            """
        )
    )
    process = subprocess.Popen(command(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] waiting\n"
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert re.search(
        rf"\noneaccord run: ended by {number.name}, when the ranks were here:\n(  .*rank.* at script.py:\d+.*\n)+$", stderr
    )
    assert "the trace is in trace.json" in stderr
    assert "Traceback" not in stderr
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("cut_off", "doing"),
    [("Simulation", "was making a world of 2 ranks, before any ran"), ("_write", "wrote the trace")],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_or_after_the_run_says_what_was_going_on(tmp_path, monkeypatch, capsys, cut_off, doing, number):
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(launcher, cut_off, interrupted)
    monkeypatch.chdir(tmp_path)
    handlers = [signal.signal(each, signal.default_int_handler) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        Path("script.py").write_text("")
        config = SimulatedConfig(trace="trace.json")
        request = LaunchRequest("script.py", False, (), 2, "simulated", {}, True, config)
        assert launcher.launch(request) == 128 + number
    finally:
        for each, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(each, handler)
    known = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert not [line for line in known if line.startswith(("RANK=", "WORLD_SIZE=", "GROUP_RANK="))]
    assert capsys.readouterr().err.strip() == f"oneaccord run: ended by {number.name}, while it {doing}"
