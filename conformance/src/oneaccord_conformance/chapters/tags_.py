"""Messages with tags, which core makes of the backend's messages: any sender, any number on the way, and waits of several threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import oneaccord as oa
from oneaccord.api import Group, Work
from oneaccord_conformance.arrays import bits, same
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_COUNTS = (0, 1, 1200, 1300, 9000, 70_000, 600_000)
_LONG = 300_000


def _sizes(group: Group) -> None:
    if group.rank > 1:
        return
    for count in _COUNTS:
        if group.rank == 0:
            group.send(bits(0, count, "uint8", count), 1, tag=count)
        else:
            out = np.full(count + 3, 9, np.uint8)
            group.recv(0, tag=count, out=out)
            same(out[:count], bits(0, count, "uint8", count), f"uint8[{count}] with a tag")
            same(out[count:], np.full(3, 9, np.uint8), "what is behind it in a larger out=")


@check(chapter="tags")
def check_every_size(worlds: WorldMaker) -> None:
    """Messages with tags come whole, short and long ones, into an ``out=`` that may be larger."""
    worlds.run(_sizes, 2)


def _any_source(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for count in (3, _LONG):
        if rank:
            first = group.send_async(np.full(count, rank), 0, tag=rank)
            group.send(np.full(count, -rank), 0, tag=size)
            first.wait()
        else:
            status, found = oa.Status(), []
            for _ in range(1, size):
                array = group.recv(oa.ANY, tag=size, status=status)
                assert status.source is not None
                same(array, np.full(count, -status.source), f"int64[{count}] from any rank")
                found.append(status.source)
            assert sorted(found) == list(range(1, size)), f"any source found {found}"
            for source in range(1, size):
                same(group.recv(source, tag=oa.ANY_TAG), np.full(count, source), f"int64[{count}] with any tag")
        group.barrier()


def _many_senders(group: Group) -> None:
    rank, size = group.rank, group.world_size
    if rank:
        for number in range(20):
            group.send_async(np.full(1 + 500 * number, number), 0, tag=rank).wait()
        return
    last = dict.fromkeys(range(1, size), -1)
    for _ in range(20 * (size - 1)):
        status = oa.Status()
        array = group.recv(oa.ANY, tag=oa.ANY_TAG, status=status)
        assert status.source is not None
        last[status.source] += 1
        same(array, np.full(1 + 500 * last[status.source], last[status.source]), f"message from rank {status.source}")


@check(chapter="tags")
def check_any_source(worlds: WorldMaker) -> None:
    """A rank waits for all others at once, and gets the messages of each in the order in which they were sent."""
    worlds.run(_any_source, 3)
    for size in worlds.sizes:
        if size > 1:
            worlds.run(_many_senders, size)
    worlds.run(_wildcards_of_requests, 3)


def _wildcards_of_requests(group: Group) -> None:
    rank, size = group.rank, group.world_size
    receives = [group.recv_async(oa.ANY, tag=1) for _ in range(size - 1)]
    sends = [group.send_async(np.full(_LONG, rank), dest, tag=1) for dest in range(size) if dest != rank]
    sources = sorted(int(work.wait()[0]) for work in receives)
    assert sources == [source for source in range(size) if source != rank], f"requests of any source found {sources}"
    oa.wait_all(sends)


def _requests(group: Group) -> None:
    other = 1 - group.rank
    for count in (2, _LONG // 10):
        outs = [np.empty(count) for _ in range(40)]
        works: list[Work[Any]] = [group.recv_async(other, tag=tag, out=out) for tag, out in enumerate(outs)]
        works += [group.send_async(np.full(count, float(tag)), other, tag=tag) for tag in reversed(range(40))]
        oa.wait_all(works)
        for tag, out in enumerate(outs):
            same(out, np.full(count, tag, float), f"float64[{count}] with tag {tag}, of 40 on the way")


@check(chapter="tags")
def check_requests(worlds: WorldMaker) -> None:
    """Any number of sends and receives may be on the way, long ones before short ones in any order."""
    worlds.run(_requests, 2)
    worlds.run(_large_first, 2)


def _large_first(group: Group) -> None:
    if group.rank == 0:
        oa.wait_all([group.send_async(np.arange(_LONG), 1, tag=1), group.send_async(np.arange(3), 1, tag=2)])
    elif group.rank == 1:
        same(group.recv(0, tag=2), np.arange(3), "the second message, received first")
        same(group.recv(0, tag=1), np.arange(_LONG), "the first message, received second")


def _probes(group: Group) -> None:
    if group.rank == 0:
        assert group.iprobe() is None, "iprobe found a message that nobody sent"
        group.send(np.arange(5), 1, tag=7, mode="sync")
    elif group.rank == 1:
        status = group.probe()
        assert (status.source, status.tag, status.count) == (0, 7, 5), f"probe found {status!r}"
        same(group.take(0, 7).recv(), np.arange(5), "a message that was taken")
        assert group.iprobe() is None, "iprobe found a message that was taken"


@check(chapter="tags")
def check_probes(worlds: WorldMaker) -> None:
    """A message can be looked at and taken before it is received, and its sender learns when that was."""
    worlds.run(_probes, 2)


def _threads(group: Group) -> None:
    other, failures = 1 - group.rank, list[BaseException]()

    def talk(tag: int) -> None:
        try:
            for number in range(12):
                count = 1 + 4000 * number
                if (tag + group.rank) % 2:
                    group.send(np.full(count, number), other, tag=tag)
                same(group.recv(oa.ANY, tag=tag), np.full(count, number), f"message {number} with tag {tag}")
                if not (tag + group.rank) % 2:
                    group.send(np.full(count, number), other, tag=tag)
        except BaseException as failure:  # noqa: BLE001 - raised below, in the rank's own thread
            failures.append(failure)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


@check(chapter="tags")
def check_threads(worlds: WorldMaker) -> None:
    """Several threads of a rank send and receive at once: one waits on the transport for all, and others interrupt it."""
    worlds.run(_threads, 2)
