"""An active proxy on the path between ranks: it can end the job, and no more."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.active_proxy import VIA_PROXY, Tampering, active_proxy, chance
from support.fault_tools import Nursery
from support.worlds import free_port, on_threads

import oneaccord as oa
from oneaccord.config.resolve import Resolved

LINK = b"tcp\0\0"
"""What the hello of a connection begins with that is to carry messages."""

PROGRAM = (
    VIA_PROXY
    + """
def work():
    with oa.init(timeout_s=float(os.environ["WITHIN_S"])) as group:
        for turn in range(3):
            for n in (1, 0, 100, 40_000):
                mine = np.arange(n) * 1.0 + rank + turn
                expected = np.arange(n) * 2.0 + 1 + 2 * turn
                if not np.array_equal(group.all_reduce(mine), expected):
                    tell("wrong", n=n)
                if not np.array_equal(group.sendrecv(mine, 1 - rank, 1 - rank), mine + 1 - 2 * rank):
                    tell("wrong", n=n)
            with group.split(0) as part:
                if part.all_gather_object(rank + turn) != [turn, 1 + turn]:
                    tell("wrong", n=-1)

outcome = attempt(work)
tell("ended", typed=outcome is None or isinstance(outcome, oa.OneAccordError))
"""
)


def run(nursery: Nursery, tampering: Tampering, checksum: str = "true", within_s: str = "30") -> dict[int, str]:
    """Return what each rank was told, nothing where all went well; each result was right, and each error is a typed one."""
    with (
        active_proxy(tampering) as proxy,
        nursery.ranks(PROGRAM, 2, PROXY=str(proxy.port), WITHIN_S=within_s, ONEACCORD_SECURITY__CHECKSUM=checksum) as ranks,
    ):
        raised = ranks.start().raised()
        assert [fact["typed"] for fact in ranks.await_facts("ended")] == [True, True], (tampering, raised, ranks.output())
        assert [fact for fact in ranks.facts if fact["what"] == "wrong"] == [], tampering
        return {rank: f"{fact['type']}: {fact['text']}" for rank, fact in raised.items()}


def test_who_only_listens_changes_nothing(nursery: Nursery) -> None:
    assert run(nursery, Tampering(b"nothing", "up", 0, "flip")) == {}


@pytest.mark.parametrize(("direction", "which"), [("up", 0), ("up", 1), ("down", 1)])
def test_a_changed_control_frame_ends_the_job_on_both_ranks(nursery: Nursery, direction: str, which: int) -> None:
    told = run(nursery, Tampering(b"control", direction, 400, "flip", which), "false")
    assert len(told) == 2
    for words in told.values():
        assert words.startswith("ProtocolError")
        assert "the connection was tampered with" in words


@pytest.mark.parametrize(
    ("place", "direction"), [*((place, "up") for place in (0, 65, 90, 165, 200_000)), (65, "down"), (200_000, "down")]
)
def test_a_changed_message_ends_the_job_on_both_ranks(nursery: Nursery, direction: str, place: int) -> None:
    told = run(nursery, Tampering(LINK, direction, place, "flip"))
    assert len(told) == 2
    for words in told.values():
        assert words.startswith("ProtocolError")
        assert "the received message is not the one that rank" in words
        assert "the connection was tampered with" in words


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 200))])
def test_whatever_is_done_to_a_connection_each_result_is_right_and_each_error_typed(nursery: Nursery, seed: int) -> None:
    run(nursery, chance(seed), within_s="4")


def configured(*checksums: bool) -> list[object]:
    """Let ranks with these settings meet, and sum; return what each got or raised."""
    port = free_port()

    def body(rank: int) -> object:
        config = {
            "backend": "tcp",
            "rendezvous": {"address": f"127.0.0.1:{port}"},
            "security": {"checksum": checksums[rank]},
        }
        with oa.init(config=config, rank=rank, world_size=2, timeout_s=30) as group:
            return float(group.all_reduce(np.ones(1))[0])

    return on_threads(body, 2)


def test_ranks_that_disagree_about_seals_do_not_meet() -> None:
    for error in configured(True, False):
        assert isinstance(error, oa.RendezvousError)
        assert "security.checksum" in str(error)


def test_a_backend_that_cannot_seal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runnable = Resolved.runnable
    monkeypatch.setattr(Resolved, "runnable", lambda *given: dataclasses.replace(runnable(*given), checksum=False))
    assert configured(False, False) == [2.0, 2.0]
    for error in configured(True, True):
        assert isinstance(error, oa.ConfigError)
        assert "the backend 'tcp' cannot seal its messages" in str(error)
