"""Random programs of collectives, groups, messages and handles, compared with what NumPy says that every rank must get.

A program is a list of instructions, the same on all ranks; a rank leaves out those of groups that it is not in. What a rank
gives to an instruction follows from (seed, instruction, rank), so that the expected results need no communication.
``RANDOM_PROGRAMS=1000`` runs that many of them on each backend.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support.worlds import over_sockets, thread_world

from oneaccord.api import Group

PROGRAMS = int(os.environ.get("RANDOM_PROGRAMS", "40"))
BATCH = 10
OPS: dict[str, Callable[[list[Any]], Any]] = {
    "sum": lambda parts: np.sum(parts, axis=0),
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
    "xor": lambda parts: np.bitwise_xor.reduce(parts, axis=0),
}
COLLECTIVES = (
    "all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all scan exscan barrier ring uneven".split()
)


@dataclass
class Instruction:
    kind: str
    number: int
    members: tuple[int, ...] = ()
    group: int = 0
    made: list[int] = field(default_factory=list)
    chosen: tuple[int, ...] = ()
    colors: dict[int, int | None] = field(default_factory=dict)
    count: int = 0
    root: int = 0
    op: str = "sum"
    later: bool = False
    in_place: bool = False


def make_program(seed: int, world: int) -> list[Instruction]:
    """Return a random program."""
    draw = random.Random(seed)
    groups: list[tuple[int, ...]] = [tuple(range(world))]
    open_groups = [0]
    program = []
    for number in range(draw.randrange(5, 25)):
        group = draw.choice(open_groups)
        members = groups[group]
        kind = draw.choice([*COLLECTIVES, *COLLECTIVES, *COLLECTIVES, "split", "subgroup", "close", "wait"])
        step = Instruction(kind, number, members, group, count=draw.choice([0, 1, 2, 7, 100, 5000]))
        step.root = draw.randrange(len(members))
        step.op = draw.choice(list(OPS))
        step.later = draw.random() < 0.5
        step.in_place = draw.random() < 0.3
        if kind == "split":
            colors = {rank: draw.choice([None, 0, 1, 7]) for rank in members}
            step.colors = colors
            for color in sorted({color for color in colors.values() if color is not None}):
                step.made.append(len(groups))
                open_groups.append(len(groups))
                groups.append(tuple(rank for rank in reversed(members) if colors[rank] == color))
        elif kind == "subgroup":
            step.chosen = tuple(draw.sample(members, draw.randrange(1, len(members) + 1)))
            step.made.append(len(groups))
            open_groups.append(len(groups))
            groups.append(step.chosen)
        elif kind == "close":
            if group == 0:
                continue
            open_groups.remove(group)
        program.append(step)
    return program


def data(seed: int, number: int, rank: int, shape: tuple[int, ...]) -> Any:
    """Return what a rank gives to an instruction."""
    return np.random.default_rng([seed, number, rank]).integers(-1000, 1000, shape)


class Runner:
    """One rank's run of a program."""

    def __init__(self, seed: int, world: Group) -> None:
        self.seed = seed
        self.me = world.rank
        self.groups: dict[int, Group] = {0: world}
        self.pending: list[tuple[Any, Any, Instruction]] = []

    def run(self, program: list[Instruction]) -> int:
        for step in program:
            if self.me in step.members:
                self.step(step)
        self.wait_for_all()
        return len(program)

    def step(self, step: Instruction) -> None:
        group = self.groups[step.group]
        match step.kind:
            case "wait":
                self.wait_for_all()
            case "close":
                group.close()
            case "split":
                # The oracle lists members from the last to the first.
                new = group.split(step.colors[self.me], key=-group.rank)
                colors = sorted({color for color in step.colors.values() if color is not None})
                assert (new is None) == (step.colors[self.me] is None)
                if new is not None:
                    self.groups[step.made[colors.index(step.colors[self.me])]] = new
            case "subgroup":
                new = group.subgroup([step.members.index(rank) for rank in step.chosen])
                assert (new is None) == (self.me not in step.chosen)
                if new is not None:
                    assert new.ranks == step.chosen
                    self.groups[step.made[0]] = new
            case "ring":
                self.ring(step, group)
            case _:
                self.collective(step, group)

    def give(self, step: Instruction, rank: int, shape: tuple[int, ...]) -> Any:
        return data(self.seed, step.number, step.members[rank], shape)

    def collective(self, step: Instruction, group: Group) -> None:
        size, mine, n = group.world_size, group.rank, step.count
        name, arguments, keywords = step.kind, [], {}
        expected: Any
        whole = [self.give(step, rank, (n,)) for rank in range(size)]
        blocks = [self.give(step, rank, (size * min(n, 100), 2)) for rank in range(size)]
        parts = [np.split(block, size) for block in blocks]
        given = whole[mine]
        match step.kind:
            case "all_reduce":
                arguments, expected = [given, step.op], OPS[step.op](whole)
            case "reduce":
                arguments, expected = [given, step.op, step.root], OPS[step.op](whole) if mine == step.root else None
            case "broadcast":
                arguments, expected = [given, step.root], whole[step.root]
            case "all_gather":
                arguments, expected = [given], np.concatenate(whole)
            case "uneven":
                name, counts = "all_gather", [rank * n // 3 for rank in range(size)]
                ragged = [self.give(step, rank, (counts[rank],)) for rank in range(size)]
                arguments, keywords, expected = [ragged[mine]], {"counts": counts}, np.concatenate(ragged)
            case "gather":
                arguments, expected = [given, step.root], np.concatenate(whole) if mine == step.root else None
            case "scatter":
                arguments, expected = [blocks[mine] if mine == step.root else None, step.root], parts[step.root][mine]
            case "reduce_scatter":
                arguments, expected = [blocks[mine], step.op], OPS[step.op]([part[mine] for part in parts])
            case "all_to_all":
                arguments, expected = [blocks[mine]], np.concatenate([part[mine] for part in parts])
            case "scan":
                arguments, expected = [given, step.op], OPS[step.op](whole[: mine + 1])
            case "exscan":
                identity = {"max": -(2**63), "min": 2**63 - 1}.get(step.op, 0)
                arguments, expected = [given, step.op], OPS[step.op](whole[:mine] or [np.full(n, identity)])
            case _:
                name, expected = "barrier", None
        if step.in_place and name in {"all_reduce", "broadcast", "scan", "exscan"}:
            keywords["out"] = given
            expected = expected.copy()
        if step.later:
            self.pending.append((getattr(group, f"{name}_async")(*arguments, **keywords), expected, step))
        else:
            self.check(getattr(group, name)(*arguments, **keywords), expected, step)

    def ring(self, step: Instruction, group: Group) -> None:
        size, mine = group.world_size, group.rank
        if size == 1:
            return
        after, before = (mine + 1) % size, (mine - 1) % size
        given, expected = (self.give(step, rank, (step.count,)) for rank in (mine, before))
        if step.later:
            self.pending.append((group.recv_async(before), expected, step))
            self.pending.append((group.send_async(given, after), None, step))
        else:
            self.check(group.sendrecv(given, after, before), expected, step)

    def wait_for_all(self) -> None:
        for work, expected, step in self.pending:
            self.check(work.wait(), expected, step)
        self.pending.clear()

    def check(self, result: Any, expected: Any, step: Instruction) -> None:
        if expected is None:
            assert result is None, step
        else:
            assert result.dtype == expected.dtype, step
            np.testing.assert_array_equal(result, expected, err_msg=str(step))


def run_program(seed: int, backend: str) -> None:
    world = random.Random(-seed).randrange(2, 6)
    program = make_program(seed, world)

    def body(group: Group) -> int:
        return Runner(seed, group).run(program)

    outcomes = thread_world(body, world, "simulated") if backend == "simulated" else over_sockets(body, world)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert not failed, f"program {seed} in a world of {world}: {failed}"


@pytest.mark.parametrize("backend", ["simulated", "tcp"])
@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[pytest.mark.long] if first >= 2 * BATCH else []) for first in range(0, PROGRAMS, BATCH)],
)
def test_programs_get_what_numpy_says(backend: str, first: int) -> None:
    for seed in range(first, min(first + BATCH, PROGRAMS)):
        run_program(seed, backend)
