"""The launcher and signals, and what ranks leave running, with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.launch_tools import DRIVER, WATCHED, Watch, environment, forking, launch, start, started, state_of
from support.waiting import until

pytestmark = pytest.mark.usefixtures("ranks_in_both_forms", "no_launcher_stays")


WITH_CHILDREN = WATCHED + textwrap.dedent("""
    code = "import os, sys, signal; p = os.open(sys.argv[1], os.O_WRONLY); os.write(p, b'%d\\\\n' % os.getpid()); signal.pause()"
    # Its traceback would run into that of the rank.
    subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], stderr=subprocess.DEVNULL)
    report(sys.argv[1])
    while True:
        signal.pause()
""")

STUBBORN = WATCHED + textwrap.dedent("""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: print(signal.Signals(number).name))
    report(sys.argv[1])
    while True:
        signal.pause()
""")


@pytest.mark.parametrize("module", ["oneaccord.group.init", "numpy.linalg"])
def test_a_ctrl_c_while_a_rank_starts_is_told_without_the_frames_of_what_it_imports(tmp_path: Path, module: str) -> None:
    result = launch(
        tmp_path,
        f"""
        import sys
        import oneaccord as oa
        class Interrupted:
            def find_spec(self, name, *_):
                if name == {module!r}:
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupted())
        oa.init()
        """,
        ranks=1,
        fork=False,
    )
    shown = re.findall(r'File "(.*)", line', result.stderr)
    assert {Path(each).name for each in shown} == {"program.py"}  # its second frame is the finder's
    assert len(re.findall(r"KeyboardInterrupt$", result.stderr, re.MULTILINE)) == 2  # raised above, and told once


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_no_process_and_no_folder(tmp_path: Path, watch: Watch, number: signal.Signals) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start(tmp_path, WITH_CHILDREN, ranks=2, args=[str(watch.path)], environ={"TMPDIR": str(temporary)})
    watch.wait_for(4)
    assert len(list(temporary.iterdir())) == 1, "a folder that is not there cannot be left behind"
    process.send_signal(number)
    _, err = process.communicate(timeout=50)
    watch.assert_all_gone()
    until(lambda: not list(temporary.iterdir()))
    if number == signal.SIGKILL:
        return
    assert process.returncode == 128 + number
    said = err[err.rindex("oneaccord run: ") :]
    if number == signal.SIGINT:  # which Python turns into a traceback that tells where it was
        assert re.fullmatch(r"oneaccord run: ended by SIGINT, when the ranks were here:\n(  ranks? [01].*: at .*:\d+\n)+", said)
    else:
        assert said == f"oneaccord run: ended by {number.name}\n"


def test_a_signal_is_passed_on_once_and_then_the_ranks_are_killed(tmp_path: Path, watch: Watch) -> None:
    process = start(tmp_path, STUBBORN, ranks=2, args=[str(watch.path)], end_s=0.5)
    watch.wait_for(2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=50)
    assert process.returncode == 143
    assert len(out.splitlines()) <= 2  # on a busy machine a rank may be killed before it has said anything
    assert {*out.splitlines()} <= {"[0] SIGTERM", "[1] SIGTERM"}
    watch.assert_all_gone()


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path, watch: Watch) -> None:
    process = start(tmp_path, STUBBORN, ranks=2, args=[str(watch.path)], end_s=3600.0)
    watch.wait_for(2)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert sorted([process.stdout.readline(), process.stdout.readline()]) == ["[0] SIGINT\n", "[1] SIGINT\n"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=50)
    assert process.returncode == 130
    watch.assert_all_gone()


def test_a_signal_that_was_ignored_before_stays_ignored_here_and_in_the_ranks(tmp_path: Path, watch: Watch) -> None:
    script = WATCHED + textwrap.dedent("""
        report(sys.argv[1])
        assert sys.stdin.readline() == "go on\\n"
        print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)
    """)
    job = {"target": str(tmp_path / "program.py"), "end_s": 30.0, "fork": forking[-1], "args": [str(watch.path)]}
    (tmp_path / "program.py").write_text(script)
    command = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", DRIVER, json.dumps(job)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(),
        text=True,
    )
    started.append(process)
    (rank,) = watch.wait_for(1)
    process.send_signal(signal.SIGINT)
    os.kill(rank, signal.SIGINT)
    out, err = process.communicate("go on\n", timeout=50)
    assert (process.returncode, out, err) == (0, "[0] True\n", "")


def test_a_signal_does_not_put_off_the_end_of_ranks_that_hang_after_a_failure(tmp_path: Path, watch: Watch) -> None:
    script = WATCHED + textwrap.dedent("""
        signal.signal(signal.SIGTERM, lambda *_: report(sys.argv[1]))
        report(sys.argv[1])
        if os.environ["RANK"] == "1":
            while not os.path.exists("rank 0 reports"):
                time.sleep(0.01)
            sys.exit("the cause")
        open("rank 0 reports", "w").close()
        while True:
            signal.pause()
    """)
    launcher = start(tmp_path, script, ranks=2, args=[str(watch.path)], end_s=2, grace_s=600)
    watch.wait_for(3)  # the last time for the launcher's own SIGTERM
    launcher.terminate()
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM


def test_the_line_of_the_last_signal_is_told(tmp_path: Path) -> None:
    script = """
        import os, signal
        from oneaccord.job.error_file import install
        seen = []
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1) if seen else seen.append(1))
        install(int(os.environ["RANK"]))
        os.kill(os.getpid(), signal.SIGTERM)
        print("ready", flush=True)
        while True:
            signal.pause()
    """
    launcher = start(tmp_path, script, ranks=1)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "[0] ready\n"
    launcher.terminate()
    assert launcher.stderr is not None
    # Line 7 is where the first signal came. The second one finds the rank at any line after it.
    assert re.search(r"  rank 0: at program\.py:(8|9|10)\n", launcher.stderr.read())


def test_programs_keep_their_own_handlers_of_signals(tmp_path: Path) -> None:
    script = """
        import faulthandler, os, signal, sys
        from oneaccord.job.error_file import install
        if os.environ["RANK"] == "0":
            own = open("own", "w")
            faulthandler.register(signal.SIGTERM, own, chain=False)
            install(0)
            os.kill(os.getpid(), signal.SIGTERM)
            print("most recent call first" in open("own").read())
        else:
            install(1)
            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
            if not (child := os.fork()):
                os.kill(os.getpid(), signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert sorted(launch(tmp_path, script, ranks=2).stdout.splitlines()) == ["[0] True", "[1] 7"]


def test_ctrl_z_stops_the_ranks_too(tmp_path: Path, watch: Watch) -> None:
    script = WATCHED + textwrap.dedent("""
        report(sys.argv[1])
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
    """)
    gate = tmp_path / "gate"
    # A process group of its own in a session that has others: elsewhere SIGTSTP does nothing.
    launcher = start(tmp_path, script, ranks=2, args=[str(watch.path), str(gate)], process_group=0)
    ranks = watch.wait_for(2)
    os.kill(launcher.pid, signal.SIGTSTP)
    _, status = os.waitpid(launcher.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    for rank in ranks:  # which have the signal, and may still be on their way to a stop
        until(lambda rank=rank: state_of(rank) == "T", "the rank is stopped")
    os.kill(launcher.pid, signal.SIGCONT)
    gate.touch()
    assert launcher.wait(timeout=60) == 0


def test_what_a_rank_leaves_running_may_end_by_itself(tmp_path: Path) -> None:
    script = """
        import os, subprocess, sys
        subprocess.Popen([sys.executable, "-c", '''if True:
            import os, time
            while not os.path.exists("told"):
                time.sleep(0.01)
            open("result", "w").write("all")
            print("written")
        '''])
    """
    launcher = start(tmp_path, script, ranks=2)
    assert launcher.stderr is not None
    said = launcher.stderr.readline()
    (tmp_path / "told").touch()
    done = subprocess.CompletedProcess("", launcher.wait(timeout=60), *launcher.communicate())
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] written", "[1] written"])
    assert re.fullmatch(
        r"oneaccord run: ranks 0-1 ended and left processes running, which may take 30 s to end \(--grace\): python\S* \d+, python\S* \d+\n",
        said,
    )
    assert done.stderr == ""
    assert (tmp_path / "result").read_text() == "all"


def test_what_a_rank_leaves_running_for_too_long_is_ended_and_named(tmp_path: Path, watch: Watch) -> None:
    script = WATCHED + textwrap.dedent("""
        if sys.argv[2:]:
            report(sys.argv[1])
            print("ready", flush=True)
            signal.pause()
        child = subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"], stdout=subprocess.PIPE)
        child.stdout.readline()
    """)
    done = launch(tmp_path, script, args=[str(watch.path)], grace_s=0.2)
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(r"oneaccord run: ended what ranks had left running: python\S* \d+\n", done.stderr)
    watch.wait_for(1)
    watch.assert_all_gone()


def test_signals_are_served_while_nobody_reads_the_output(tmp_path: Path) -> None:
    with start(tmp_path, "while True: print('x' * 100)", ranks=2) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.read(1)  # the ranks run; from now on the pipe only fills
        launcher.terminate()
        assert launcher.wait(50) == 128 + signal.SIGTERM
