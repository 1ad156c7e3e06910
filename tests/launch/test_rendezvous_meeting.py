"""Where and how ranks meet, and what each rank learns when they cannot."""

from __future__ import annotations

import re
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fault_tools import LONG_BEFORE_S, TELLING_JOINS, Nursery
from support.worlds import free_port, on_threads

import oneaccord as oa
from oneaccord.contract.deadline import Deadline
from oneaccord.net import finding
from oneaccord.net.credentials import Credentials

Run = Callable[..., "subprocess.CompletedProcess[str]"]


INIT = "attempt(oa.init, timeout_s=30)"
JOINING = TELLING_JOINS + INIT
MEET = """
    with oa.init(timeout_s=30) as group:
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
    "a name": {"MASTER_ADDR": "localhost"},
    "ONEACCORD_RENDEZVOUS": {"MASTER_ADDR": None, "MASTER_PORT": None, "ONEACCORD_RENDEZVOUS": "127.0.0.1:PORT"},
    "IPv6": {"MASTER_ADDR": "::1"},
    "IPv6 in brackets": {"MASTER_ADDR": "[::1]"},
    "IPv6 by ONEACCORD_RENDEZVOUS": {"ONEACCORD_RENDEZVOUS": "[::1]:PORT"},
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
import oneaccord.net.finding as finding
dial = finding.dial
def dialling(*args):
    try:
        return dial(*args)
    except OSError:
        tell("refused")
        raise
finding.dial = dialling
"""


def test_rank_0_may_come_last(nursery: Nursery) -> None:
    with nursery.ranks(TELLING_DIALS + textwrap.dedent(MEET)) as ranks:
        ranks.start(1).await_facts("refused", 1)
        ranks.start(2).await_facts("refused", 10)
        ranks.start(0).wait()
        assert [fact["value"] for fact in ranks.await_facts("sum")] == [3.0] * 3


@pytest.mark.parametrize("by", ["file", "variable"])
def test_where_the_launcher_lets_ranks_meet_wins_over_the_configured_address(
    run_python: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The address in a file that several hosts share says nothing about a job on one host."""
    (tmp_path / "program.py").write_text(
        "import oneaccord as oa, numpy as np\n"
        "with oa.init(timeout_s=30) as group:\n    print(group.all_reduce(np.ones(1))[0])\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as other:  # where ranks cannot meet
        address = f"127.0.0.1:{other.getsockname()[1]}"
        if by == "file":
            (tmp_path / "oneaccord.toml").write_text(f'[rendezvous]\naddress = "{address}"\n')
        else:
            monkeypatch.setenv("ONEACCORD_RENDEZVOUS__ADDRESS", address)
        done = run_python("-m", "oneaccord", "run", "-n", "2", "--backend", "tcp", "program.py")
    assert sorted(done.stdout.splitlines()) == ["[0] 2.0", "[1] 2.0"], done
    assert (done.returncode, done.stderr) == (0, "")


def meeting(
    which: Sequence[int],
    world_size: int,
    address: str = "127.0.0.1",
    timeout_s: float = 2,
    secrets: Sequence[Path | None] = (),
    other: Mapping[str, Any] | None = None,
    port: int | None = None,
) -> list[Any]:
    """Let some ranks meet, as threads, of which the last has other settings; return what became of each."""
    port = free_port() if port is None else port

    def body(number: int) -> None:
        rendezvous: dict[str, Any] = {"address": f"{address}:{port}", "timeout_s": timeout_s}
        if secrets:
            rendezvous["secret_file"] = secrets[number] and str(secrets[number])
        config = {"backend": "tcp", "rendezvous": rendezvous, **(other or {} if number == len(which) - 1 else {})}
        oa.init(config=config, rank=which[number], world_size=config.pop("world_size", world_size), timeout_s=30).close()

    return on_threads(body, len(which))


@pytest.mark.parametrize("which", [0, 1])
def test_a_name_that_does_not_resolve_is_told(which: int) -> None:
    (error,) = meeting([which], 2, "no-such-host.invalid", 0.5)
    assert type(error) is oa.DeadlineError
    assert re.search(r"the name 'no-such-host\.invalid' did not resolve within 0\.5 s \(.+\)", str(error))


def test_the_second_port_is_dialled_every_second_round(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[int] = []

    def refuse(place: tuple[str, int], *_: object) -> None:
        dialled.append(place[1])
        raise ConnectionRefusedError

    monkeypatch.setattr(finding, "dial", refuse)
    places = [("127.0.0.1", port) for port in (1, 2, 3, 4)]
    search = finding.Search(places, Credentials(b"s"), b"", 1, Deadline(30), lambda: len(dialled) == 14)
    with pytest.raises(oa.RendezvousError):
        search.dial()
    assert dialled == [1, 2, 1, 3, 1, 2, 1, 4, 1, 2, 1, 3, 1, 2]


def test_an_unreachable_rank_0_is_told_when_the_time_is_up() -> None:
    (error,) = meeting([1], 2, timeout_s=0.5)
    assert (type(error), error.peer) == (oa.RendezvousError, 0)
    assert re.search(r"could not reach rank 0 .*127\.0\.0\.1:\d+", str(error))


def test_ranks_that_never_come_are_named() -> None:
    for error in meeting([0, 1, 3], 5):
        assert (type(error), error.peer) == (oa.DeadlineError, 2)
        assert "within 2 s: ranks 2, 4 of 5 did not come" in str(error)
        assert "Rank 0 listens at 127.0.0.1, which only ranks of its own host can reach" in str(error)


@pytest.mark.parametrize(
    ("stray", "failure", "words"),
    [
        (
            {"RANK": "1", "ONEACCORD_RUN_ID": "the first"},
            "RendezvousError",
            "belongs to the job 'the first', but the job 'the second' meets at 127.0.0.1:",
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "ONEACCORD_RUN_ID": "the second"},
            "RendezvousError",
            "is not in a world of 2, which rank 0 was started for",
        ),
    ],
)
def test_who_belongs_to_another_job_is_refused_alone(
    nursery: Nursery, stray: dict[str, str | None], failure: str, words: str
) -> None:
    program = """
        group = attempt(oa.init, timeout_s=40)
        if isinstance(group, oa.Group):
            tell("sum", sum=float(group.all_reduce(np.full(1, float(os.environ["MINE"])))[0]))
            group.close()
    """
    with nursery.ranks(program, 2, MINE="2", ONEACCORD_RUN_ID="the second") as ranks:
        ranks.start(0)
        ranks.start_as(7, MINE="100", **stray)
        assert ranks.wait([7]) == {7: 0}
        ranks.start(1)
        assert [fact["sum"] for fact in ranks.await_facts("sum")] == [4.0, 4.0]
        ((_, raised),) = ranks.raised().items()
    assert raised["type"] == failure
    assert words in raised["text"]


@pytest.mark.parametrize("wrong", [[2], [0]])
@pytest.mark.parametrize("has_none", [False, True])
def test_ranks_with_another_secret_are_told_at_once_and_rank_0_that_they_were_refused(
    tmp_path: Path, wrong: list[int], has_none: bool
) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"the {name} one")
    another = None if has_none else tmp_path / "wrong"
    errors = meeting(range(3), 3, secrets=[another if rank in wrong else tmp_path / "right" for rank in range(3)])
    refused = [1, 2] if wrong == [0] else wrong
    for rank, error in enumerate(errors):
        if rank in refused:
            assert type(error) is oa.AuthenticationError
            assert "another secret" in str(error)
        else:
            assert type(error) is oa.DeadlineError
            assert f"Connections were refused, {len(refused)} in all: from 127.0.0.1 with another secret." in str(error)
        assert "ONEACCORD_SECRET" in str(error)
        assert "wrong one" not in str(error)


@pytest.mark.parametrize("address", ["0.0.0.0", "OWN"])
@pytest.mark.parametrize("run", ["", "a word that everybody may know"])
@pytest.mark.parametrize("secret", ["", "changeme"])
def test_without_a_secret_that_nobody_can_guess_nothing_but_loopback_is_listened_on(
    address: str, run: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEACCORD_RUN_ID", run)
    monkeypatch.setenv("ONEACCORD_SECRET", secret)
    host = address.replace("OWN", own_address() or "0.0.0.0")
    (error,) = meeting([0], 2, host)
    assert type(error) is oa.AuthenticationError
    assert f"listening at {host} with{' a secret that can be guessed' if secret else 'out a secret'}" in str(error)
    assert "ONEACCORD_SECRET" in str(error)
    assert "changeme" not in str(error)


def test_a_secret_that_can_be_guessed_is_not_shown_to_whoever_has_taken_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    host = own_address()
    if host is None:
        pytest.skip("this host has no address but loopback")
    monkeypatch.setenv("ONEACCORD_SECRET", "changeme")
    with socket.create_server((host, 0)) as squatter:
        (error,) = meeting([1], 2, host, port=squatter.getsockname()[1])
        assert type(error) is oa.AuthenticationError
        assert f"meeting at {host} with a secret that can be guessed" in str(error)
        with squatter.accept()[0] as heard:
            assert heard.recv(1000) == b""


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
        assert "two processes claim to be rank 1" in failure["text"]
        assert all(pid in failure["text"] for pid in pids)
        assert failure["ended"] - came_at < LONG_BEFORE_S


DIFFERENCES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "world sizes": ({"world_size": 4}, ["started for 4 ranks", "rank 0 for 3", "start all ranks alike"]),
    "backends": ({"backend": "simulated"}, ["'tcp'", "'simulated'", "all ranks need the same"]),
    "algorithms": ({"algorithms": {"all_reduce": "ring"}}, ["all_reduce=ring", "all ranks need the same"]),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_were_started_differently_are_refused(what: str) -> None:
    other, words = DIFFERENCES[what]
    for error in meeting(range(3), 3, timeout_s=30, other=other):
        assert type(error) is oa.RendezvousError
        assert [word for word in words if word not in str(error)] == [], str(error)


def test_a_server_that_greets_otherwise_is_told_at_once(nursery: Nursery) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(45)
        port = server.getsockname()[1]
        with nursery.ranks(INIT, 2, MASTER_PORT=str(port)) as ranks:
            ranks.start(1)
            caller, _ = server.accept()
            with caller:
                caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                failure = ranks.raised()[1]
    assert failure["type"] == "RendezvousError"
    assert "is not a oneaccord job: it sent b'SSH-2.0" in failure["text"]
    assert failure["took"] < LONG_BEFORE_S


def test_a_rank_may_leave_while_it_connects_to_the_stores_successor(nursery: Nursery) -> None:
    program = """
    from oneaccord.control.protocol import Leave
    from oneaccord.control.remote import SocketControl, _Wire
    leaves, connects = threading.Event(), threading.Event()
    follow, open, post = SocketControl.follow, _Wire.open, SocketControl._post
    def following(control, sock, successor):
        leaves.wait(30)
        follow(control, sock, successor)
    def opening(wire, sock):
        if leaves.is_set():
            connects.set()
            time.sleep(0.2)
        open(wire, sock)
    def posting(control, message):
        if isinstance(message, Leave):
            leaves.set()
            connects.wait(30)
        post(control, message)
    SocketControl.follow, _Wire.open, SocketControl._post = following, opening, posting
    with oa.init(timeout_s=30) as group:
        group.barrier()
    """
    with nursery.ranks(program, 3) as ranks:
        assert ranks.start().wait() == {0: 0, 1: 0, 2: 0}, ranks.output()
