"""Several threads of a rank."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from oneaccord.api import Group
from oneaccord_conformance.arrays import bits, same
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_TURNS = 4
_TRIES = 5
"""How often a backend may be late: a machine that has much to do is, now and then, and a wait that keeps out another is always."""


def _on_threads(bodies: Sequence[Callable[[], None]]) -> None:
    """Run functions on threads of this rank; raise the exception of the first of them."""
    raised: list[BaseException] = []

    def live(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - raised again by the rank
            raised.append(error)

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(live, body), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def _own_groups(group: Group) -> None:
    size = group.world_size
    groups = [made for made in (group.split(0) for _ in range(3)) if made is not None]

    def work(number: int) -> None:
        for turn in range(15):
            for count in (3, 8000):
                same(
                    groups[number].all_reduce(np.full(count, 100 * number + turn)),
                    np.full(count, size * (100 * number + turn)),
                    f"all_reduce {turn} by thread {number}, each with a group of its own",
                )

    _on_threads([lambda number=number: work(number) for number in range(3)])  # type: ignore[misc]
    for made in groups:
        made.close()
    group.barrier()


@check(chapter="threads")
def check_a_group_for_each(worlds: WorldMaker) -> None:
    """Threads with groups of their own call at the same time."""
    worlds.run(_own_groups, 3)


def _messages(group: Group) -> None:
    rank, size = group.rank, group.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    count = 4000

    def send() -> None:
        for number in range(40):
            group.send(np.full(count * (1 + number % 9), number + rank), after)

    def receive() -> None:
        for number in range(40):
            same(
                group.recv(before),
                np.full(count * (1 + number % 9), number + before),
                f"message {number}, while this rank sends",
            )

    def collect() -> None:
        for number in range(20):
            same(
                group.all_reduce(np.full(50, number)),
                np.full(50, size * number),
                f"all_reduce {number}, while this rank sends and receives",
            )

    _on_threads([send, receive, collect])


@check(chapter="threads")
def check_sending_receiving_and_collecting(worlds: WorldMaker) -> None:
    """One thread sends, one receives and one calls collectives, all in one group."""
    worlds.run(_messages, 2)
    worlds.run(_messages, 3)


def _peers(group: Group) -> None:
    rank, size = group.rank, group.world_size

    def talk(peer: int) -> None:
        for number in range(15):
            for count in (2, 9000):
                expected = bits(peer * size + rank, count, "int64", number)
                same(
                    group.sendrecv(bits(rank * size + peer, count, "int64", number), peer, peer),
                    expected,
                    f"sendrecv {number} with rank {peer}, with a thread for each rank",
                )

    _on_threads([lambda peer=peer: talk(peer) for peer in range(size) if peer != rank])  # type: ignore[misc]


@check(chapter="threads")
def check_a_thread_for_each_peer(worlds: WorldMaker) -> None:
    """A thread for each other rank exchanges messages with it."""
    worlds.run(_peers)


def _one_waits(group: Group) -> list[float]:
    rank, took, is_waiting = group.rank, [0.0, 0.0], threading.Event()

    def talk(number: int) -> None:
        for _ in range(_TURNS):
            if rank == 0:
                time.sleep(0.05)  # so that the other thread waits by then, for the first time and again
                began = time.monotonic()
                group.send(np.ones(2), 2)
                group.recv(2)
                took[number] += time.monotonic() - began
            elif rank == 2:
                group.recv(0)
                group.send(np.ones(2), 0)

    talk(0)
    group.barrier()
    if rank == 0:

        def stay() -> None:
            is_waiting.set()
            group.recv(1)

        def release() -> None:
            is_waiting.wait()
            talk(1)
            group.send(np.ones(1), 1)

        _on_threads([stay, release])
    elif rank == 1:
        group.recv(0)
        group.send(np.ones(1), 0)
    else:
        talk(1)
    return took


@check(chapter="threads", needs="cpu clock")
def check_one_waits_while_another_talks(worlds: WorldMaker) -> None:
    """A thread that waits for a message does not hold up messages of another thread."""
    alone = beside = 0.0
    for _ in range(_TRIES):
        alone, beside = worlds.run(_one_waits, 3)[0]
        if beside < 4 * alone + 0.15 * _TURNS:
            return
    raise AssertionError(
        f"{_TURNS} messages there and back took {beside:.2f} s while another thread waited in recv, but {alone:.2f} s without it: "
        "wait() of one thread must not keep out that of another"
    )
