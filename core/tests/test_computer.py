"""What the system tells of processes."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys

from support.waiting import until

from oneaccord.runtime.computer import has_ended, namespaces


def test_a_process_has_ended_from_its_death_on_also_where_nobody_has_asked_for_its_code_yet() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not has_ended(child.pid)
    child.kill()
    until(lambda: has_ended(child.pid))
    child.communicate()
    assert has_ended(child.pid)


def test_who_cannot_be_looked_up_may_run() -> None:
    """Else a rank that has no descriptors left would take the others for dead, and go on alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        answer = has_ended(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not answer


def test_a_kind_of_namespaces_that_the_kernel_does_not_have_is_one_for_all() -> None:
    assert namespaces("no-such-kind")
    assert namespaces("pid", "no-such-kind") == namespaces("pid") != namespaces("no-such-kind")


def test_a_process_that_gives_back_much_memory_has_ended_as_soon_as_its_connections_have() -> None:
    ours, theirs = socket.socketpair()
    code = "import sys; memory = bytearray(b'x') * (1 << 27); print(flush=True); input()"
    with (
        ours,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]
        ) as child,
    ):
        theirs.close()
        assert child.stdout is not None
        child.stdout.readline()
        child.kill()
        assert ours.recv(1) == b""
        assert has_ended(child.pid)
