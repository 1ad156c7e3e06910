"""Ranks that do not make the same call: every rank gets an error."""

from __future__ import annotations

from typing import Any

import numpy as np

from oneaccord.api import Group
from oneaccord_conformance import patience
from oneaccord_conformance.ranks import Outcome, ending, join
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

Words = tuple[str, dict[str, Any]]
"""A call: its name, and its special properties: count, shape, dtype, and the method's own arguments."""


def _call(group: Group, words: Words) -> None:
    name, facts = words
    arguments = dict(facts)
    shape = tuple(arguments.pop("shape", [arguments.pop("count", 12)]))
    array = np.ones(shape, arguments.pop("dtype", "float32"))
    if name == "nothing":
        return
    if name == "barrier":
        group.barrier()
    elif name == "scatter":
        group.scatter(array if arguments.get("root", 0) == group.rank else None, **arguments)
    else:
        method = getattr(group, name.removesuffix("_async") + ("_async" if name.endswith("_async") else ""))
        made = method(array, **arguments)
        if name.endswith("_async"):
            made.wait()


def _differ(group: Group, kinds: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Make each kind of call in a group of its own; return how it ended, and how a barrier after it did."""

    def call(own: Group, words: Words) -> None:
        own.barrier()  # it may be over on another rank, and not yet here
        _call(own, words)

    found = []
    for number, kind in enumerate(kinds):
        own = join() if number else group
        words = kind["odd"] if group.rank == kind["who"] else kind["others"]
        found.append([ending(lambda: call(own, words)), ending(own.barrier)])  # noqa: B023 - called at once
        own.close()
    return found


_KINDS: dict[str, tuple[Words, Words]] = {
    "size": (("all_reduce", {"count": 13}), ("all_reduce", {})),
    "a long size": (("all_reduce", {"count": 300_001}), ("all_reduce", {"count": 300_000})),
    "nothing against something": (("all_reduce", {"count": 0}), ("all_reduce", {"count": 1})),
    "shape": (("all_reduce", {"shape": [3, 4]}), ("all_reduce", {"shape": [4, 3]})),
    "dtype": (("all_reduce", {"dtype": "float64"}), ("all_reduce", {})),
    "a dtype of the same size": (("all_reduce", {"dtype": "int32"}), ("all_reduce", {})),
    "dtype of a broadcast": (("broadcast", {"dtype": "uint32"}), ("broadcast", {})),
    "op": (("all_reduce", {"op": "max"}), ("all_reduce", {"op": "sum"})),
    "op of a long reduce_scatter": (
        ("reduce_scatter", {"op": "max", "count": 120_000}),
        ("reduce_scatter", {"op": "min", "count": 120_000}),
    ),
    "root": (("broadcast", {"root": 1}), ("broadcast", {"root": 0})),
    "root of a reduce": (("reduce", {"root": 1}), ("reduce", {"root": 0})),
    "root of a gather": (("gather", {"root": 2}), ("gather", {"root": 0})),
    "broadcast against all_reduce": (("broadcast", {}), ("all_reduce", {})),
    "barrier against all_reduce": (("barrier", {}), ("all_reduce", {})),
    "all_gather against barrier": (("all_gather", {}), ("barrier", {})),
    "gather against all_gather": (("gather", {}), ("all_gather", {})),
    "all_to_all against reduce_scatter": (("all_to_all", {}), ("reduce_scatter", {})),
    "scan against exscan": (("scan", {}), ("exscan", {})),
    "in the background": (("all_reduce_async", {"count": 5}), ("all_reduce_async", {})),
    "a size of all_gather": (("all_gather", {"count": 5}), ("all_gather", {})),
    "a size of all_to_all": (("all_to_all", {"count": 15}), ("all_to_all", {})),
    "one call left out": (("nothing", {}), ("all_reduce", {})),
}


def _check_kinds(worlds: WorldMaker, names: list[str], who: int) -> None:
    kinds = [{"who": who, "odd": _KINDS[name][0], "others": _KINDS[name][1]} for name in names]
    if worlds.has_threads:
        outcomes = worlds.attempts(_differ, [{"kinds": [kind]} for kind in kinds], 3, timeout_s=patience.LONG_S)
    else:  # a world takes long to start
        whole = worlds.attempt(_differ, 3, timeout_s=patience.LONG_S, kinds=kinds)
        for rank, each in enumerate(whole):
            assert not each.errors, f"rank {rank}, when all ranks had left a group and made another one: it {each}"
        outcomes = [[Outcome([each.value[number]]) for each in whole] for number in range(len(kinds))]
    for name, per_rank in zip(names, outcomes, strict=True):
        for rank, outcome in enumerate(per_rank):
            what = f"a mismatch ({name}, on rank {who} of 3): rank {rank}"
            assert not outcome.errors, f"{what} {outcome}"
            first = next((each for each in outcome.value[0] if each["errors"]), None)
            assert first is not None, f"{what} got no error, neither by this call nor by a barrier after it"
            assert "CollectiveMismatchError" in first["errors"], (
                f"{what} got {first['errors'][0]} instead of CollectiveMismatchError: {first['text']}"
            )
            assert worlds.lacks("clock") or first["took_s"] < patience.PROMPT_S, (
                f"{what} learned of it after {first['took_s']:.1f} s"
            )


@check(chapter="mismatches")
def check_arguments(worlds: WorldMaker) -> None:
    """Size, shape, dtype, op or root differ on one rank: every rank gets a CollectiveMismatchError."""
    names = list(_KINDS)[:12]
    _check_kinds(worlds, names[::3] if worlds.quick else names, 1)


@check(chapter="mismatches")
def check_calls(worlds: WorldMaker) -> None:
    """One rank makes another call, or leaves one out: every rank gets a CollectiveMismatchError."""
    names = list(_KINDS)[12:]
    _check_kinds(worlds, names[::3] if worlds.quick else names, 0)


def _message(group: Group, count: int, dtype: str) -> list[dict[str, Any]]:
    def call() -> None:
        group.barrier()
        if group.rank == 0:
            group.send(np.ones(10, "float32"), 1)
        elif group.rank == 1:
            group.recv(0, out=np.zeros(count, dtype))

    return [ending(call), ending(group.barrier)]


@check(chapter="mismatches")
def check_messages(worlds: WorldMaker) -> None:
    """A message that does not fit the out= of its receiver is an error on every rank, and no byte of it is lost silently."""
    cases = [{"count": 9, "dtype": "float32"}, {"count": 11, "dtype": "float32"}, {"count": 10, "dtype": "int32"}]
    cases = cases if worlds.has_threads else cases[:1]
    for case, outcomes in zip(cases, worlds.attempts(_message, cases, 3, timeout_s=patience.LONG_S), strict=True):
        what = f"float32[10] was sent, and received into {case['dtype']}[{case['count']}]"
        for rank, outcome in enumerate(outcomes):
            assert not outcome.errors, f"{what}: rank {rank} {outcome}"
            first = next((each for each in outcome.value if each["errors"]), None)
            assert first is not None, f"{what}: rank {rank} got no error"
            assert "CollectiveMismatchError" in first["errors"], (
                f"{what}: rank {rank} got {first['errors'][0]}: {first['text']}"
            )


def _refused(group: Group) -> list[list[str]]:
    calls = [
        lambda: group.all_reduce(np.ones(3, bool), "sum"),
        lambda: group.broadcast(np.ones(3), 99),
        lambda: group.all_reduce(np.ones(3), out=np.ones(2)),
        lambda: group.all_gather(np.array(["text"])),
        lambda: group.all_gather(np.ones(3), counts=[1]),
    ]
    found = [ending(call)["errors"] for call in calls]
    group.barrier()
    assert group.all_reduce(group.rank).item() == sum(range(group.world_size)), (
        "the group cannot be used after calls that were refused"
    )
    return found


@check(chapter="mismatches")
def check_what_no_rank_can_do(worlds: WorldMaker) -> None:
    """A call that is impossible is refused before any byte moves, and the group stays usable."""
    for errors in worlds.run(_refused):
        assert all("UsageError" in each for each in errors), errors
