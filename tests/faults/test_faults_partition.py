"""Networks that part: each side is told what it can know, the larger one may go on, and what is joined in time goes on as if nothing had been."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.fault_tools import LONG_BEFORE_S, Nursery, Ranks
from support.user_space_network import ENTER, Network, can_make_networks

from oneaccord.net.keepalive import _TCP_RTO_MAX_MS

pytestmark = pytest.mark.skipif(not can_make_networks(), reason="making hosts needs root, iproute2 and /dev/net/tun")

PROGRAM = (
    ENTER
    + """
import json
group = oa.init(timeout_s=60, config={"liveness": json.loads(os.environ["LIVENESS"])})
size = group.world_size
step = 0
def work():
    global step
    while True:
        stops = float(os.path.exists(os.environ["GO"]))
        got = group.all_reduce(np.array([step, stops]))
        assert got[0] == size * step, (step, got)
        step += 1
        if step == 10:
            tell("running")
        if got[1]:
            return
        time.sleep(0.01)

attempt(work)
tell("worked", steps=step)
"""
)


def tries_often() -> bool:
    """Tell whether the kernel can be told how often to try again."""
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)
        except OSError:
            return False
    return True


@contextmanager
def job(nursery: Nursery, program: str, world_size: int, patience_s: int) -> Iterator[tuple[Ranks, Network]]:
    """Have a rank on a host of its own each; all of them run."""
    liveness = f'{{"heartbeat_s": 1, "patience_s": {patience_s}}}'
    with (
        Network(world_size) as network,
        nursery.ranks(program, world_size, MASTER_ADDR=network.address(0), LIVENESS=liveness) as ranks,
    ):
        for rank in range(world_size):
            ranks.start(rank, NAMESPACE=network.namespace(rank))
        ranks.await_facts("running")
        yield ranks, network


@pytest.mark.parametrize("apart_s", [1.0, pytest.param(8.0, marks=pytest.mark.long)])
def test_a_network_that_is_joined_in_time_goes_on(nursery: Nursery, apart_s: float) -> None:
    """What was under way is sent again by the kernels; the ranks need not do anything."""
    if apart_s > 5 and not tries_often():
        pytest.skip("this kernel, before 6.15, tries again too late")
    with job(nursery, PROGRAM, 3, patience_s=10) as (ranks, network):
        with network.cut([0, 1], [2]):
            joins_at = time.monotonic() + apart_s
            while time.monotonic() < joins_at:
                ranks.read(0.1)
        ranks.go()
        assert [fact["steps"] > 0 for fact in ranks.await_facts("worked")] == [True] * 3
        assert not [fact for fact in ranks.facts if fact["what"] == "raised"]
        ranks.wait()
        assert ranks.output() == ""


LONG_MESSAGES = (
    ENTER
    + """
import json
group = oa.init(timeout_s=60, config={"liveness": json.loads(os.environ["LIVENESS"])})
def work():
    step = 0
    while True:
        stops = os.path.exists(os.environ["GO"])
        if group.rank == 0:
            group.send(np.full(5_000_000, stops), 1, tag=1)
        else:
            stops = group.recv(oa.ANY, tag=1)[-1]
        step += 1
        if step == 2:
            tell("running")
        if stops:
            return step

attempt(work)
tell("worked")
"""
)


def test_a_link_that_is_down_in_the_middle_of_a_message_is_no_deadlock(nursery: Nursery) -> None:
    """Both ranks wait then, the sender for room and the receiver for the rest, and neither need act."""
    with job(nursery, LONG_MESSAGES, 2, patience_s=10) as (ranks, network):
        for _ in range(2):
            with network.cut([0], [1]):
                joins_at = time.monotonic() + 1.5
                while time.monotonic() < joins_at:
                    ranks.read(0.1)
            ranks.read(0.3)
        ranks.go()
        ranks.await_facts("worked")
        assert not [fact for fact in ranks.facts if fact["what"] == "raised"]
        ranks.wait()
        assert ranks.output() == ""


SHRINKING = (
    PROGRAM
    + """
failure = attempt(group.shrink, timeout_s=30)
if isinstance(failure, Exception):
    tell("ended", ranks=[])
else:
    with failure as group:
        assert group.all_reduce(np.ones(1))[0] == group.world_size
        tell("ended", ranks=list(group._job.control.origins))
"""
)


@pytest.mark.parametrize(
    ("sides", "go_on"),
    [
        pytest.param((0, 0, 0, 1), [0, 1, 2], id="one is cut off", marks=pytest.mark.long),
        pytest.param((0, 1, 1), [1, 2], id="rank 0 is cut off"),
        pytest.param((0, 0, 1, 1), [0, 1], id="of equal sides that with the store", marks=pytest.mark.long),
    ],
)
def test_a_network_that_parts(nursery: Nursery, sides: tuple[int, ...], go_on: list[int]) -> None:
    """Whoever is on one side learns that one of the other is lost, and one side goes on, never both."""
    parts = [[rank for rank, its in enumerate(sides) if its == side] for side in (0, 1)]
    with job(nursery, SHRINKING, len(sides), patience_s=2) as (ranks, network):
        parted_at = time.monotonic()
        with network.cut(*parts):
            ended = ranks.await_facts("ended")
        for fact in ended:
            rank = fact["rank"]
            assert fact["ranks"] == (go_on if rank in go_on else []), ranks.facts
            told = [each for each in ranks.facts if each["what"] == "raised" and each["rank"] == rank]
            assert len(told) == (1 if rank in go_on else 2)
            # Not before the patience is over, of which a heartbeat may have passed when the network parts.
            assert 1.0 < told[0]["ended"] - parted_at < LONG_BEFORE_S
            for each in told:
                assert each["type"] == "PeerLostError"
                assert sides[each["about"]] != sides[rank], each
                assert "cut off" in each["text"] or "must not continue beside them" in each["text"]
