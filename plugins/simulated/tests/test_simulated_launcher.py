"""``manyhands run --backend simulated``: an unchanged script, on threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run a script as four ranks; the arguments are those before and after the script."""

    def run(
        source: str, *args: str, options: tuple[str, ...] = (), target: tuple[str, ...] = ("script.py",)
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(textwrap.dedent(source))
        return subprocess.run(
            command(options, target, args), cwd=tmp_path, capture_output=True, text=True, timeout=40, check=False
        )

    return run


def command(options: tuple[str, ...] = (), target: tuple[str, ...] = ("script.py",), args: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "manyhands", "run", "-n", "4", "--backend", "simulated", *options, *target, *args]


def test_an_unchanged_script_has_globals_arguments_and_a_prefix_of_its_own_on_each_rank(launch):
    done = launch(
        """
        import sys
        import manyhands as mh

        mine = []

        def add(value):
            global mine
            mine = [*mine, value]

        class Thing:
            pass

        if __name__ == "__main__":
            with mh.init() as group:
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
        import manyhands as mh

        with mh.init() as group:
            for number in range(50):
                print("line", number, end=" ")
                print("of", group.rank)
            print("error", file=sys.stderr)
            print("rest", end="")
        """
    )
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [*[f"[{rank}] line {number} of {rank}" for number in range(50)], f"[{rank}] rest"]
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] error" for rank in range(4)]


def test_no_prefix(launch):
    source = "import sys\nimport manyhands as mh\nwith mh.init() as g:\n    sys.stdout.write('hello\\n')"
    done = launch(source, options=("--no-prefix",))
    assert (done.returncode, done.stdout) == (0, "hello\n" * 4)


def test_a_module_and_a_package(launch, tmp_path):
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "from . import other\nimport manyhands as mh\nwith mh.init() as g:\n    print(other.NAME, __name__, g.rank)\n"
    )
    (package / "other.py").write_text("NAME = 'relative'\n")
    done = launch("", target=("-m", "tool"))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] relative __main__ {rank}" for rank in range(4)]
    done = launch("import manyhands as mh\nwith mh.init() as g:\n    print(g.rank)", target=("-m", "script"))
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank}" for rank in range(4)]


def test_imports_from_beside_the_script(launch, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "program.py").write_text("import beside\nprint(beside.NAME)\n")
    (tmp_path / "sub" / "beside.py").write_text("NAME = 'found'\n")
    done = launch("", target=("sub/program.py",))
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] found" for rank in range(4)]


@pytest.mark.parametrize("before", [True, False], ids=["before init", "in the group"])
def test_the_first_failing_rank_is_shown_last_and_decides_the_exit_code(launch, before):
    where = "early" if before else "late"
    done = launch(
        f"""
        import manyhands as mh
        from manyhands.api import current_rank

        def broken():
            raise KeyError("mine")

        if {before} and current_rank() == 2:
            broken()  # early
        with mh.init() as group:
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
        import manyhands as mh

        with mh.init() as group:
            if group.rank == 1:
                sys.exit({})
            group.barrier()
        """
    assert launch(source.format("7")).returncode == 7
    done = launch(source.format("'in words'"))
    assert done.returncode == 1
    assert "in words" in done.stderr
    source = "import sys\nimport manyhands as mh\nwith mh.init() as g:\n    g.barrier()\nsys.exit(0)"
    assert launch(source).returncode == 0


def test_a_rank_that_fails_between_two_groups_stops_the_others(launch):
    done = launch(
        """
        import manyhands as mh

        with mh.init() as group:
            group.barrier()
        if group.rank == 1:
            raise KeyError("between")
        try:
            with mh.init() as group:
                group.barrier()
        except mh.AbortedError as error:
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
    (tmp_path / "manyhands.toml").write_text("timeout_s = 0.2\n")
    done = launch("import manyhands as mh\nwith mh.init() as g:\n    g.recv((g.rank + 1) % 4)")
    assert done.returncode == 1
    assert "did not finish within 0.2 s" in done.stderr


def test_ctrl_c_ends_every_rank(launch, tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import manyhands as mh

            with mh.init() as group:
                group.barrier()
                if group.rank == 0:
                    print("waiting")
                group.recv((group.rank + 1) % 4)
            """
        )
    )
    process = subprocess.Popen(command(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] waiting\n"
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in stderr
