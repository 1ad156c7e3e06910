"""Schedules of scans, right and wrong: which ranks are combined, in which order, and who gets anything."""

from __future__ import annotations

from support.schedule_tools import IN, OUT, caught, world

from oneaccord.schedule.algorithms import prefix
from oneaccord.schedule.proof.terms import Terms
from oneaccord.schedule.proof.verify import MalformedScheduleError, OrderError, WrongResultError, verify
from oneaccord.schedule.steps import Collective, Copy, Recv, RecvReduce, Send

SCAN, EXSCAN = Collective.SCAN, Collective.EXSCAN


def test_a_scan_combines_the_ranks_up_to_each_one_in_their_order_and_no_others() -> None:
    zero, one = (Copy(OUT, IN), Send(1, IN)), (RecvReduce(0, OUT, IN, incoming_first=True),)
    report = verify(world(SCAN, zero, one), ordered=True, canonical=True)
    assert (report.ordered, report.canonical) == (True, True)
    caught(
        OrderError,
        world(SCAN, zero, (RecvReduce(0, OUT, IN),)),
        r"rank 1, output chunk 0 .* is \(r1 op r0\), and a scan combines in the order of ranks",
    )
    exchanged = ((Send(1, IN), RecvReduce(1, OUT, IN)), (Send(0, IN), RecvReduce(0, OUT, IN, incoming_first=True)))
    caught(
        WrongResultError, world(SCAN, *exchanged), "rank 0, output chunk 0 .* contributions of rank 1 1 times.* of rank 0 alone"
    )
    caught(
        WrongResultError,
        world(SCAN, (Copy(OUT, IN),), (Copy(OUT, IN),)),
        "rank 1, .*of rank 0 0 times.* of every rank 0 to 1 once",
    )


def test_an_exscan_leaves_out_a_ranks_own_part_and_gives_rank_0_nothing() -> None:
    verify(world(EXSCAN, (Send(1, IN),), (Recv(0, OUT),)), ordered=True, canonical=True)
    caught(
        WrongResultError,
        world(EXSCAN, (Send(1, IN),), (RecvReduce(0, OUT, IN, incoming_first=True),)),
        "rank 1, .* of rank 0 alone",
    )
    caught(
        MalformedScheduleError,
        world(EXSCAN, (Send(1, IN), Copy(OUT, IN)), (Recv(0, OUT),)),
        "rank 0, step 1: .* holds no output in exscan",
    )


def test_the_reproducible_scan_is_from_left_to_right() -> None:
    terms = Terms()
    assert [str(terms.folded(size)) for size in (1, 2, 4)] == ["r0", "(r0 op r1)", "(((r0 op r1) op r2) op r3)"]
    caught(
        OrderError,
        [prefix.scan(rank, 4) for rank in range(4)],
        r"rank 2, .* is \(r0 op \(r1 op r2\)\); expected \(\(r0 op r1\) op r2\), as in",
        canonical=True,
    )
