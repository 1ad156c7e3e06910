"""Where and how ranks meet, and what each rank learns when they cannot."""

from __future__ import annotations

import http.server
import socket
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fault_tools import TELLING_JOINS, Nursery, Ranks

PROMPT_S = 4.0
"""What needs no waiting is told within this time, far below the timeouts."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


INIT = "attempt(mh.init, timeout_s=20)"
JOINING = TELLING_JOINS + INIT
MEET = """
    with mh.init(timeout_s=10) as group:
        tell("sum", value=float(group.all_reduce(np.ones(1))[0]))
"""


def own_address() -> str | None:
    """Return an address of this host that is not loopback, None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a datagram socket: nothing is sent
        except OSError:
            return None
        host = str(probe.getsockname()[0])
    return None if host.startswith("127.") else host


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


PLACES = {
    "loopback": {},
    "another loopback address": {"MASTER_ADDR": "127.1.2.3"},
    "a name": {"MASTER_ADDR": "localhost"},
    "MANYHANDS_RENDEZVOUS": {"MASTER_ADDR": None, "MASTER_PORT": None, "MANYHANDS_RENDEZVOUS": "127.0.0.1:PORT"},
    "IPv6": {"MASTER_ADDR": "::1"},
    "IPv6 in brackets": {"MASTER_ADDR": "[::1]"},
    "IPv6 by MANYHANDS_RENDEZVOUS": {"MANYHANDS_RENDEZVOUS": "[::1]:PORT"},
    "an address of the network": {"MASTER_ADDR": "OWN"},
}


@pytest.mark.parametrize("place", PLACES)
def test_ranks_meet(nursery: Nursery, place: str) -> None:
    if "IPv6" in place and not has_ipv6():
        pytest.skip("this host has no IPv6")
    own = own_address()
    if place == "an address of the network" and own is None:
        pytest.skip("this host has no address but loopback")
    with nursery.ranks(MEET) as ranks:
        variables = {
            name: value and value.replace("PORT", str(ranks.port)).replace("OWN", own or "")
            for name, value in PLACES[place].items()
        }
        ranks.start(**variables).wait()
        assert ranks.output() == ""
        assert [fact["value"] for fact in ranks.await_facts("sum")] == [3.0] * 3


TELLING_DIALS = """
import manyhands.control.network as network
dial = network.dial
def dialling(*args):
    try:
        return dial(*args)
    except OSError:
        tell("refused")
        raise
network.dial = dialling
"""


def test_rank_0_may_come_last(nursery: Nursery) -> None:
    with nursery.ranks(TELLING_DIALS + textwrap.dedent(MEET)) as ranks:
        ranks.start(1).await_facts("refused", 1)
        ranks.start(2).await_facts("refused", 10)
        ranks.start(0).wait()
        assert [fact["value"] for fact in ranks.await_facts("sum")] == [3.0] * 3


def test_a_port_in_use_is_named_at_once(nursery: Nursery) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, nursery.ranks(INIT, 2) as ranks:
        port = other.getsockname()[1]
        failure = ranks.start(0, MASTER_PORT=str(port)).raised()[0]
    assert failure["type"] == "RendezvousError"
    assert f"127.0.0.1:{port}" in failure["text"]
    assert "in use" in failure["text"]
    assert "choose a free" in failure["text"]
    assert failure["took"] < PROMPT_S


def test_an_address_of_another_host_is_refused_at_once(nursery: Nursery) -> None:
    with nursery.ranks(INIT, 2, MASTER_ADDR="198.51.100.7") as ranks:
        failure = ranks.start(0).raised()[0]
    assert failure["type"] == "RendezvousError"
    assert "198.51.100.7" in failure["text"]
    assert "no address of this host" in failure["text"]
    assert failure["took"] < PROMPT_S


@pytest.mark.parametrize("by", ["file", "variable"])
def test_where_the_launcher_lets_ranks_meet_wins_over_the_configured_address(
    run_python: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The address in a file that several hosts share says nothing about a job on one host."""
    (tmp_path / "program.py").write_text(
        "import manyhands as mh, numpy as np\n"
        "with mh.init(timeout_s=10) as group:\n    print(group.all_reduce(np.ones(1))[0])\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as other:  # where ranks cannot meet
        address = f"127.0.0.1:{other.getsockname()[1]}"
        if by == "file":
            (tmp_path / "manyhands.toml").write_text(f'[rendezvous]\naddress = "{address}"\n')
        else:
            monkeypatch.setenv("MANYHANDS_RENDEZVOUS__ADDRESS", address)
        done = run_python("-m", "manyhands", "run", "-n", "2", "--backend", "tcp", "program.py")
    assert sorted(done.stdout.splitlines()) == ["[0] 2.0", "[1] 2.0"], done
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("late", [0, 1])
def test_a_resolver_that_hangs_does_not_outlast_the_deadline(nursery: Nursery, late: int) -> None:
    program = """
        import socket
        socket.getaddrinfo = lambda *_, **__: time.sleep(20)
        attempt(mh.init, timeout_s=0.5)
        os._exit(0)  # the thread that asks the resolver still hangs
    """
    with nursery.ranks(program, 2, MASTER_ADDR="a.name.invalid") as ranks:
        failure = ranks.start(late).raised()[late]
    assert failure["type"] in ("DeadlineError", "RendezvousError")
    assert "a.name.invalid" in failure["text"]
    assert 0.4 < failure["took"] < 5


def test_a_name_that_does_not_resolve_is_told(nursery: Nursery) -> None:
    with nursery.ranks("attempt(mh.init, timeout_s=0.5)", 2, MASTER_ADDR="no-such-host.invalid") as ranks:
        failures = ranks.start().raised()
    assert {failure["type"] for failure in failures.values()} == {"RendezvousError"}
    assert all("no-such-host.invalid" in failure["text"] for failure in failures.values())


def test_an_unreachable_rank_0_is_told_when_the_time_is_up(nursery: Nursery) -> None:
    with nursery.ranks("attempt(mh.init, timeout_s=0.5)", 2) as ranks:
        failure = ranks.start(1).raised()[1]
        assert (failure["type"], failure["about"]) == ("RendezvousError", 0)
        assert f"127.0.0.1:{ranks.port}" in failure["text"]
    assert "could not reach rank 0" in failure["text"]
    assert 0.4 < failure["took"] < 5


def test_ranks_that_never_come_are_named(nursery: Nursery) -> None:
    program = 'attempt(mh.init, config={"backend": "tcp", "rendezvous": {"timeout_s": 1}})'
    with nursery.ranks(program, 5) as ranks:
        failures = ranks.start(0, 1, 3).raised()
    assert sorted(failures) == [0, 1, 3]
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("DeadlineError", 2)
        assert "within 1 s: ranks 2, 4 of 5 did not come" in failure["text"]
        assert 0.9 < failure["took"] < 6


def assert_refused(ranks: Ranks, which: Sequence[int]) -> None:
    """Check that these ranks were told at once, and that rank 0 says who came when the time is up."""
    failures = ranks.raised()
    for rank in which:
        assert failures[rank]["type"] == "AuthenticationError"
        assert "another secret" in failures[rank]["text"]
        assert failures[rank]["took"] < PROMPT_S
    for rank in set(range(3)) - set(which):
        assert failures[rank]["type"] == "DeadlineError"
        assert f"Connections were refused, {len(which)} in all: from 127.0.0.1 with another secret." in failures[rank]["text"]
    for failure in failures.values():
        assert "MANYHANDS_SECRET" in failure["text"]
        assert "wrong one" not in failure["text"]


IN_TWO_SECONDS = 'attempt(mh.init, config={"rendezvous": {"timeout_s": 2}})'


@pytest.mark.parametrize("secret", ["the wrong one", None])
def test_a_rank_with_another_secret_is_told_at_once_and_the_others_when_it_does_not_come(
    nursery: Nursery, secret: str | None
) -> None:
    with nursery.ranks(IN_TWO_SECONDS) as ranks:
        ranks.start(0, 1).start(2, MANYHANDS_SECRET=secret)
        assert_refused(ranks, [2])


def test_where_rank_0_has_another_secret_all_others_are_told_at_once(nursery: Nursery) -> None:
    with nursery.ranks(IN_TWO_SECONDS) as ranks:
        ranks.start(0, MANYHANDS_SECRET="the wrong one").start(1, 2)
        assert_refused(ranks, [1, 2])


@pytest.mark.parametrize("address", ["0.0.0.0", "OWN"])
def test_without_a_secret_nothing_but_loopback_is_listened_on(nursery: Nursery, address: str) -> None:
    host = address.replace("OWN", own_address() or "0.0.0.0")
    with nursery.ranks(INIT, 2, MANYHANDS_SECRET=None, MASTER_ADDR=host) as ranks:
        failure = ranks.start(0).raised()[0]
    assert failure["type"] == "AuthenticationError"
    assert f"listening at {host} without a secret is refused" in failure["text"]
    assert "MANYHANDS_SECRET" in failure["text"]
    assert failure["took"] < PROMPT_S


def test_on_loopback_no_secret_is_needed(nursery: Nursery) -> None:
    with nursery.ranks(MEET, MANYHANDS_SECRET=None) as ranks:
        ranks.start().wait()
        assert [fact["value"] for fact in ranks.await_facts("sum")] == [3.0] * 3


def test_two_processes_of_one_rank_are_refused(nursery: Nursery) -> None:
    with nursery.ranks(JOINING) as ranks:
        ranks.start(0, 1).await_facts("joined", 2)
        came_at = time.monotonic()
        ranks.start_as(2, RANK="1")
        ranks.wait()
        pids = {str(ranks.pid(key)) for key in (1, 2)}
        failures = ranks.await_facts("raised")
    assert [failure["type"] for failure in failures] == ["RendezvousError"] * 3
    for failure in failures:
        assert "two processes say that they are rank 1" in failure["text"]
        assert all(pid in failure["text"] for pid in pids)
        assert failure["ended"] - came_at < PROMPT_S


DIFFERENCES = {
    "world sizes": ({"WORLD_SIZE": "4"}, ["started for 4 ranks", "rank 0 for 3", "start all ranks alike"]),
    "backends": ({"MANYHANDS_BACKEND": "simulated"}, ["'tcp'", "'simulated'", "all ranks need the same"]),
    "algorithms": ({"MANYHANDS_ALGORITHMS": '{"all_reduce": "ring"}'}, ["all_reduce=ring", "all ranks need the same"]),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_were_started_differently_are_refused(nursery: Nursery, what: str) -> None:
    variables, words = DIFFERENCES[what]
    with nursery.ranks(JOINING) as ranks:
        ranks.start(0, 1).await_facts("joined", 2)
        came_at = time.monotonic()
        ranks.start(2, **variables)
        failures = ranks.raised()
    assert sorted(failures) == [0, 1, 2]
    for failure in failures.values():
        assert failure["type"] == "RendezvousError", failure
        assert [word for word in words if word not in failure["text"]] == [], failure["text"]
        assert failure["ended"] - came_at < PROMPT_S


class _Hello(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_web_server_in_the_place_of_rank_0_is_told(nursery: Nursery) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hello) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with nursery.ranks("attempt(mh.init, timeout_s=1)", 2, MASTER_PORT=str(server.server_port)) as ranks:
            failure = ranks.start(1).raised()[1]
        server.shutdown()
        thread.join()
    # It answers where there is the end of a line in the random bytes of a knock. Else all that a rank can tell is that nobody answers.
    assert failure["type"] == "RendezvousError"
    assert f"127.0.0.1:{server.server_port}" in failure["text"]
    assert "said nothing" in failure["text"] or "is not a manyhands job: it said b'<!DOCTYPE" in failure["text"]
    assert failure["took"] < 6


def test_a_server_that_greets_otherwise_is_told_at_once(nursery: Nursery) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        port = server.getsockname()[1]
        with nursery.ranks(INIT, 2, MASTER_PORT=str(port)) as ranks:
            ranks.start(1)
            caller, _ = server.accept()
            with caller:
                caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                failure = ranks.raised()[1]
    assert failure["type"] == "RendezvousError"
    assert "is not a manyhands job: it said b'SSH-2.0" in failure["text"]
    assert failure["took"] < PROMPT_S


def test_a_rank_may_leave_while_it_connects_to_the_stores_successor(nursery: Nursery) -> None:
    program = """
    from manyhands.control.protocol import Leave
    from manyhands.control.remote import SocketControl, _Wire
    leaves, connects = threading.Event(), threading.Event()
    follow, open, post = SocketControl.follow, _Wire.open, SocketControl._post
    def following(control, sock, successor):
        leaves.wait(5)
        follow(control, sock, successor)
    def opening(wire, sock):
        if leaves.is_set():
            connects.set()
            time.sleep(0.2)
        open(wire, sock)
    def posting(control, message):
        if isinstance(message, Leave):
            leaves.set()
            connects.wait(5)
        post(control, message)
    SocketControl.follow, _Wire.open, SocketControl._post = following, opening, posting
    with mh.init(timeout_s=20) as group:
        group.barrier()
    """
    with nursery.ranks(program, 3) as ranks:
        assert ranks.start().wait() == {0: 0, 1: 0, 2: 0}, ranks.output()
