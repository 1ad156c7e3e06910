"""Messages with tags, which core makes of the backend's messages: any sender, any number on the way, and waits of several threads."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np

import oneaccord as oa
from oneaccord.api import DeviceMesh, Group, Work
from oneaccord_conformance import patience
from oneaccord_conformance.arrays import bits, same
from oneaccord_conformance.ranks import ending, tell, until_failed
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_COUNTS = (0, 1, 1200, 1300, 9000, 70_000, 600_000)
_LONG = 300_000
_TIMEOUT_S = 0.5


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
    worlds.run(_nothing_overtakes, 3)


def _fits(pattern: tuple[Any, Any], source: int, tag: int) -> bool:
    return pattern[0] in (oa.ANY, source) and pattern[1] in (oa.ANY_TAG, tag)


def _nothing_overtakes(group: Group) -> None:
    rank, size, each = group.rank, group.world_size, 30
    numbers = np.random.default_rng(rank)

    def one_of(*options: Any) -> Any:
        return options[numbers.integers(len(options))]

    sends: list[Work[None]] = []
    for number in range(each):
        for dest in range(size):
            message, mode = np.full(one_of(2, 3, 700, 9000, 40_000), number), one_of("standard", "buffered", "sync")
            sends.append(group.send_async(message, dest, tag=one_of(0, 1), mode=mode))
    found: list[tuple[tuple[Any, Any], Any, Any, int]] = []
    while len(found) < each * size:
        # A receive of one rank alone may wait in vain for what one of any rank has taken: only those that met something count.
        some = [(one_of(oa.ANY, *range(size)), one_of(oa.ANY_TAG, 0, 1)) for _ in range(3)]
        patterns = [*some, (oa.ANY, oa.ANY_TAG)]
        receives = [group.recv_async(source, tag=tag) for source, tag in patterns]
        oa.wait_any(receives)
        for pattern, receive in zip(patterns, receives, strict=True):
            if not receive.cancel():
                array, status = receive.wait(), receive.status
                assert status is not None, "a message that has come has no status"
                found.append((pattern, status.source, status.tag, int(array[0])))
    oa.wait_all(sends)
    for source in range(size):
        mine = [(pattern, tag, number) for pattern, sender, tag, number in found if sender == source]
        assert sorted(number for _, _, number in mine) == list(range(each)), f"rank {source}'s messages came as {mine}"
        for place, (pattern, _, number) in enumerate(mine):
            passed = [later for _, tag, later in mine[place + 1 :] if later < number and _fits(pattern, source, tag)]
            assert not passed, (
                f"message {number} of rank {source} met a receive of {pattern}, before messages {passed} that it fits"
            )


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
    worlds.run(_first_to_end, 2)


def _first_to_end(group: Group) -> None:
    other = 1 - group.rank
    never, *receives = (group.recv_async(oa.ANY, tag=tag) for tag in (3, 1, 1, 1, 1))
    sends = [group.send_async(np.full(2, number), other, tag=1) for number in range(4)]
    assert oa.wait_any([never, *sends]) > 0, "wait_any took a receive that has met nothing for one that has ended"
    assert list(oa.as_completed([*sends])), "as_completed yielded none of the sends"
    left = set(range(4))
    while left:
        ended = oa.wait_some([receives[each] for each in sorted(left)])
        left -= {sorted(left)[each] for each in ended}
    for number, receive in enumerate(receives):
        same(receive.wait(), np.full(2, number), f"message {number} of a receive that wait_some found")
    assert never.cancel(), "a receive that has met nothing cannot be taken back"


def _large_first(group: Group) -> None:
    if group.rank == 0:
        oa.wait_all([group.send_async(np.arange(_LONG), 1, tag=1), group.send_async(np.arange(3), 1, tag=2)])
    elif group.rank == 1:
        same(group.recv(0, tag=2), np.arange(3), "the second message, received first")
        same(group.recv(0, tag=1), np.arange(_LONG), "the first message, received second")


def _exchange(group: Group) -> None:
    rank, size = group.rank, group.world_size
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (3, 8000, _LONG):
        got = group.sendrecv(np.full(count, rank), right, left, tag=4)
        same(got, np.full(count, left), f"sendrecv of int64[{count}] with a tag around a ring")
        work = group.sendrecv_async(np.full(count, rank), right, left, tag=4)
        same(work.wait(), np.full(count, left), f"sendrecv_async of int64[{count}] with a tag around a ring")
    with DeviceMesh(group, (size,), ("ring",), periodic=True) as mesh:
        for count in (3, _LONG):
            before, after = mesh.neighbor_all_to_all([np.full(count, rank), np.full(count, -rank)])
            same(before, np.full(count, -left), f"int64[{count}] of the neighbour before")
            same(after, np.full(count, right), f"int64[{count}] of the neighbour after")


@check(chapter="tags")
def check_exchange(worlds: WorldMaker) -> None:
    """All ranks send at once before any receives, and exchange with their neighbours, without a deadlock."""
    for size in worlds.sizes:
        worlds.run(_exchange, size)


def _to_oneself(group: Group) -> None:
    me = group.rank
    receive = group.recv_async(me, tag=1)
    group.send(np.arange(4), me, tag=1)
    group.send(np.arange(_LONG), me, tag=2, mode="buffered")
    sync = group.send_async(np.arange(5), me, tag=3, mode="sync")
    assert not sync.done(), "a synchronous send to oneself is done before its receive has begun"
    same(group.recv(oa.ANY, tag=2), np.arange(_LONG), "a long message to oneself")
    same(receive.wait(), np.arange(4), "a message to oneself whose receive came first")
    same(group.recv(me, tag=3), np.arange(5), "a synchronous message to oneself")
    sync.wait()
    group.barrier()


@check(chapter="tags")
def check_to_oneself(worlds: WorldMaker) -> None:
    """A rank sends messages to itself, also one that is alone."""
    for size in {1, worlds.ranks}:
        worlds.run(_to_oneself, size)


def _objects(group: Group) -> None:
    values: list[Any] = [None, {"a": [1, 2.5]}, "x" * 5000, ["y" * 100] * 6000]
    for tag, value in enumerate(values):
        if group.rank == 0:
            group.send_object(value, 1, tag=tag)
            group.send_object_async(value, 1, tag=tag).wait()
        elif group.rank == 1:
            found = [group.recv_object(0, tag=tag), group.recv_object_async(oa.ANY, tag=tag).wait()]
            assert found == [value] * 2, f"object {tag} came as another one"


@check(chapter="tags")
def check_objects(worlds: WorldMaker) -> None:
    """Objects with tags come whole, short and long ones."""
    worlds.run(_objects, 2)


def _modes(group: Group) -> None:
    for count in (2, _LONG):
        x = np.arange(count)
        if group.rank == 0:
            group.recv(1, tag=9)
            group.send(x, 1, tag=1, mode="ready")
            sync = group.send_async(x, 1, tag=2, mode="sync")
            y = x.copy()
            group.send(y, 1, tag=3, mode="buffered")
            y[:] = -1
            assert not sync.done(), f"a synchronous send of int64[{count}] is done before its receive has begun"
            group.send(x, 1, tag=4, mode="buffered")
            sync.wait()
        elif group.rank == 1:
            ready = group.recv_async(0, tag=1)
            group.send(x[:1], 0, tag=9)
            same(ready.wait(), x, f"int64[{count}] that was sent in mode ready")
            same(group.recv(0, tag=3), x, f"int64[{count}] that was sent in mode buffered")
            same(group.recv(0, tag=4), x, f"int64[{count}] that was sent in mode buffered")
            same(group.recv(0, tag=2), x, f"int64[{count}] that was sent in mode sync")


@check(chapter="tags")
def check_modes(worlds: WorldMaker) -> None:
    """A synchronous send ends with its receive, a buffered one at once, and a ready one meets the receive that has begun."""
    worlds.run(_modes, 2)


def _what_is_lost(group: Group) -> None:
    for count in (10, 5000, _LONG):
        if group.rank == 0:
            for _ in range(2):
                group.send(np.arange(count), 1, tag=1)
            group.send(np.arange(3), 1, tag=2)
        elif group.rank == 1:
            never = group.recv_async(0, tag=3)
            short = np.full(count - 1, -1)
            assert "SizeMismatchError" in ending(lambda: group.recv(0, tag=1, out=short))["errors"]  # noqa: B023 - called at once
            assert (short == -1).all(), "a message that does not fit was written to out="
            assert "DTypeError" in ending(lambda: group.recv(0, tag=1, out=np.zeros(count)))["errors"]  # noqa: B023
            same(group.recv(0, tag=2), np.arange(3), "the message after two that do not fit")
            assert never.cancel(), "a receive that has met nothing cannot be taken back"


@check(chapter="tags")
def check_what_does_not_fit(worlds: WorldMaker) -> None:
    """A message that does not fit is an error of its receive alone, and a receive can be taken back; all others go on."""
    worlds.run(_what_is_lost, 2)


def _in_time(group: Group, name: str) -> dict[str, Any]:
    group.barrier()
    if group.rank:
        until_failed(group)
        return ending(group.barrier)
    calls = {
        "recv": lambda: group.recv(1, tag=1, timeout_s=_TIMEOUT_S),
        "recv from any": lambda: group.recv(oa.ANY, tag=1, timeout_s=_TIMEOUT_S),
        "a long send": lambda: group.send(np.arange(_LONG), 1, tag=1, timeout_s=_TIMEOUT_S),
        "recv_async": lambda: group.recv_async(1, tag=1, timeout_s=_TIMEOUT_S).wait(),
    }
    return ending(calls[name])


@check(chapter="tags", needs="cpu clock")
def check_deadline(worlds: WorldMaker) -> None:
    """A call that no message meets ends at its deadline."""
    names = ("recv from any", "a long send") if worlds.quick else ("recv from any", "a long send", "recv", "recv_async")
    facts = [{"name": name} for name in names]
    for name, outcomes in zip(names, worlds.attempts(_in_time, facts, 2, timeout_s=patience.LONG_S), strict=True):
        outcome = outcomes[0]
        assert not outcome.errors, f"{name} with a tag: {outcome}"
        found = outcome.value
        assert "DeadlineError" in found["errors"], f"{name} with a tag got {found['errors'][:1] or 'no error'}: {found['text']}"
        assert _TIMEOUT_S - 0.1 < found["took_s"] < _TIMEOUT_S + patience.PROMPT_S, (
            f"{name} with timeout_s={_TIMEOUT_S} ended after {found['took_s']:.2f} s"
        )


def _waits_for_any(group: Group) -> dict[str, Any]:
    group.barrier()
    tell("ready")
    if group.rank == 1:
        oa.sleep(2 * patience.LONG_S)
    return ending(lambda: group.recv(oa.ANY if group.rank else 1, tag=1))


@check(chapter="tags", needs="cpu clock processes")
def check_killed(worlds: WorldMaker) -> None:
    """A rank that is killed is named to those that wait for its messages, or for those of any rank."""
    with worlds.processes(_waits_for_any, 3, timeout_s=patience.LONG_S) as job:
        assert job.told("ready", 3), f"the ranks did not come out of their first barrier\n{job.whereabouts()}"
        since = job.signal(1, signal.SIGKILL)
        for rank, outcome in enumerate(job.outcomes(patience.LONG_S, lost=(1,))):
            if rank == 1:
                continue
            assert outcome is not None, f"rank {rank} did not return, or ended without a word\n{job.whereabouts()}"
            assert not outcome.errors, f"rank {rank} {outcome}"
            found = outcome.value
            assert ("PeerLostError" in found["errors"], found["peer"]) == (True, 1), (
                f"rank {rank} got {found['errors'][:1] or 'no error'} about rank {found['peer']}: {found['text']}"
            )
            late = found["ended"] - since
            assert late < patience.PROMPT_S, f"rank {rank} learned of it after {late:.1f} s"


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
