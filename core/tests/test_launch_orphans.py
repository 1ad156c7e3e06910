"""What a launcher does about processes that are nobody's any more: numbers, zombies, daemons, and ranks without launcher and guard."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.launch_tools import DRIVER, WATCHED, Watch, environment, forking, launch, start
from support.waiting import until

from oneaccord.control.joiners import JoinAddress
from oneaccord.local.groups import Spawned, left_in_group, signal_group
from oneaccord.net.credentials import Credentials

pytestmark = [
    pytest.mark.usefixtures("ranks_in_both_forms", "no_launcher_stays"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans and zombies are known on Linux alone"),
]

WAITING = WATCHED + textwrap.dedent("""
    report(sys.argv[1])
    while True:
        signal.pause()
""")
SLEEPER = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def children_of(process: int) -> set[int]:
    return {int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()}


def guards_of(launcher: int) -> set[int]:
    """Return the guards by their program; the folder of a test, which ranks have in their command, may be named after guards."""
    found = set()
    for child in children_of(launcher):
        with contextlib.suppress(FileNotFoundError):  # it has ended since
            if b"/guard/process.py\0" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(child)
    return found


def test_nobody_gets_the_number_of_a_rank_whose_group_may_still_be_signalled() -> None:
    leader = Spawned(["sh", "-c", "sleep 60 & exit 3"], dict(os.environ), 0, ())
    assert leader.wait() == 3
    (child,) = left_in_group(leader.pid)
    assert Path(f"/proc/{leader.pid}").exists()  # a zombie has its number still
    assert signal_group(leader.pid, signal.SIGKILL)
    until(lambda: not lives(child.process))
    leader.release()
    for stream in filter(None, (leader.stdout, leader.stderr)):
        stream.close()
    assert not Path(f"/proc/{leader.pid}").exists()


def test_no_orphan_is_taken_for_a_ranks_where_the_launcher_has_children_of_others(tmp_path: Path) -> None:
    """A shell starts something, and becomes the launcher; what that has started loses its parent during the job."""
    neighbour, go = tmp_path / "neighbour", tmp_path / "go"
    script = f"""
        import pathlib, sys, time
        pathlib.Path({str(go)!r}).touch()
        while not pathlib.Path({str(neighbour)!r}).exists():
            time.sleep(0.01)
        sys.exit(1)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(script))
    started = f"""
        import os, pathlib, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], stdout=subprocess.DEVNULL, start_new_session=True)
        while not pathlib.Path({str(go)!r}).exists():
            time.sleep(0.01)
        pathlib.Path({str(neighbour)!r} + ".written").write_text(str(child.pid))
        os.rename({str(neighbour)!r} + ".written", {str(neighbour)!r})
        os._exit(0)
    """
    job = f'{{"target": "{tmp_path / "program.py"}", "end_s": 30.0, "fork": {str(forking[-1]).lower()}}}'
    words = [sys.executable, "-c", textwrap.dedent(started), sys.executable, "-c", DRIVER, job]
    shell = '"$1" -c "$2" >/dev/null 2>&1 & shift 2; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", words[0], words[2], *words[3:]],
        capture_output=True,
        text=True,
        timeout=50,
        env=environment(),
        cwd=tmp_path,
        check=False,
    )
    process = int(neighbour.read_text())
    assert done.returncode == 1, done.stderr
    assert lives(process)
    os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 1])
def test_daemons_of_ranks_end_with_a_job_that_fails_and_are_named_otherwise(tmp_path: Path, code: int) -> None:
    script = f"""
        import subprocess, sys
        daemon = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], stdout=subprocess.PIPE, start_new_session=True)
        print(daemon.stdout.readline().decode().strip())
        sys.exit({code})
    """
    done = launch(tmp_path, script)
    daemon = int(done.stdout.removeprefix("[0] "))
    assert (done.returncode, lives(daemon)) == (code, code == 0)
    if code == 0:
        assert "daemons that ranks have started go on: " in done.stderr
        assert str(daemon) in done.stderr
        os.kill(daemon, signal.SIGKILL)


def test_a_daemon_that_ignores_sigterm_ends_with_a_job_that_fails(tmp_path: Path) -> None:
    script = f"""
        import subprocess, sys
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" + {SLEEPER!r}
        daemon = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        print(daemon.stdout.readline().decode().strip())
        sys.exit(1)
    """
    done = launch(tmp_path, script, end_s=0.2)
    assert done.returncode == 1
    assert not lives(int(done.stdout.removeprefix("[0] ")))


def test_ranks_end_where_guard_and_launcher_are_killed_together(tmp_path: Path, watch: Watch) -> None:
    launcher = start(tmp_path, WAITING, ranks=2, args=[str(watch.path)])
    ranks = watch.wait_for(2)
    (guard,) = guards_of(launcher.pid)
    launcher.send_signal(signal.SIGSTOP)
    for process in (guard, launcher.pid):
        os.kill(process, signal.SIGKILL)
    watch.assert_all_gone()
    until(lambda: not any(map(lives, ranks)))  # the end of a process begins with that of its files


def test_another_guard_takes_the_place_of_one_that_was_killed(tmp_path: Path, watch: Watch) -> None:
    launcher = start(tmp_path, WAITING, ranks=1, args=[str(watch.path)])
    (rank,) = watch.wait_for(1)
    (before,) = guards_of(launcher.pid)
    os.kill(before, signal.SIGKILL)
    until(lambda: guards_of(launcher.pid) - {before})
    assert lives(rank)
    launcher.kill()
    watch.assert_all_gone()


def test_signals_that_the_launchers_parent_has_blocked_are_blocked_in_no_rank(tmp_path: Path) -> None:
    script = """
        import signal
        print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    """
    (tmp_path / "driver.py").write_text(DRIVER)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(script))
    job = f'{{"target": "{program}", "end_s": 30.0, "fork": false}}'
    blocking = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGTERM]); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocking, str(tmp_path / "driver.py"), job],
        capture_output=True,
        text=True,
        timeout=50,
        env=environment(),
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[0] []\n"), done.stderr


def test_no_child_of_a_rank_inherits_the_socket_at_which_the_ranks_meet(tmp_path: Path) -> None:
    script = """
        import os, stat, subprocess, sys
        import oneaccord as oa
        code = "import os, stat; print(sum(stat.S_ISSOCK(os.fstat(int(fd)).st_mode) for fd in os.listdir('/proc/self/fd') if int(fd) > 2 and os.path.exists(f'/proc/self/fd/{fd}')))"
        with oa.init(backend="tcp") as group:
            if group.rank == 0:
                print(subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True).stdout.strip())
            group.barrier()
    """
    done = launch(tmp_path, script, ranks=2)
    assert (done.returncode, done.stdout) == (0, "[0] 0\n"), done.stderr


def test_no_child_of_a_rank_inherits_the_socket_by_which_others_come_later(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        environ = {"ONEACCORD_ELASTIC": str(tmp_path), "ONEACCORD_RENDEZVOUS_FD": str(listener.fileno())}
        assert JoinAddress.of(environ, Credentials.of_text(b"s" * 32)) is not None
        assert not listener.get_inheritable()


def test_a_launcher_that_is_process_1_leaves_no_zombies(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urpf", "--mount-proc", "true"], check=False).returncode:
        pytest.skip("this system lets this user make no namespace of processes")
    script = """
        import os, subprocess, sys, time
        for _ in range(3):  # each child ends at once, and leaves one that ends later
            subprocess.run(["sh", "-c", "sh -c 'exit 0' & exit 0"], start_new_session=True)
        limit = time.monotonic() + 20
        def state(process):
            try:
                return open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[0]
            except OSError:
                return "reaped since"
        while (zombies := [each for each in os.listdir("/proc") if each.isdigit() and state(each) == "Z"]) and time.monotonic() < limit:
            time.sleep(0.01)
        print(len(zombies))
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(script))
    job = f'{{"target": "{tmp_path / "program.py"}", "end_s": 30.0, "fork": false}}'
    command = ["unshare", "-Urpf", "--mount-proc", sys.executable, "-c", DRIVER, job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment(), cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "[0] 0\n"), done.stderr
