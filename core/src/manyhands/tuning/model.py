"""From predicted times to the table that comes with manyhands; `tools/make_selection_table.py` writes it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from manyhands.algorithms.registry import BUILTIN, Algorithm
from manyhands.schedule.steps import Collective
from manyhands.select import Rule, candidates, default_segments
from manyhands.simulation import PRESETS, Level, Network, simulate
from manyhands.tuning.ranges import Kind, Range, kinds, losses, ranges, time_text

__all__ = ["LAYOUTS", "SIZES", "TOLERANCE", "Layout", "model_rules", "predict"]

SIZES: Final[tuple[int, ...]] = tuple(1 << power for power in (*range(3, 31, 2), 30))
"""8 bytes to 1 GiB."""

TOLERANCE: Final[float] = 0.15
"""How much longer than the best the choice of the table may take, at the sizes and in the worlds that were simulated."""

_LAPTOP: Final[Network] = PRESETS["laptop"]

# Hosts as one finds them in a rack: one 10 Gbit/s card, which moves about 1.2 GB/s by TCP, and some 30 us from one Python process
# to another on the next host. Ranks of one host talk over loopback, as on the laptop.
_RACK: Final[Network] = Network(
    topology="fat_tree",
    summary="hosts with one 10 Gbit/s Ethernet card each at one switch",
    reduction_bytes_per_s=_LAPTOP.reduction_bytes_per_s,
    host=_LAPTOP.host,
    nic=Level(latency_s=15e-6, bandwidth_bytes_per_s=1.2e9, gap_s=5e-6),
    spine=Level(latency_s=1e-6, bandwidth_bytes_per_s=12e9, gap_s=0),
    hosts_per_leaf=64,
    oversubscription=8,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks lie on hosts, and where they are simulated.

    Attributes
    ----------
    name
        For people.
    network
        Where.
    ranks_per_host
        How many neighbouring ranks share a host; 0 where all do.
    worlds
        The numbers of ranks that are simulated, ascending.
    """

    name: str
    network: Network
    ranks_per_host: int
    worlds: tuple[int, ...]

    def neighbours(self, world_size: int) -> int:
        """Return how many ranks share a host in one of the worlds."""
        return self.ranks_per_host or world_size


LAYOUTS: Final[tuple[Layout, ...]] = (
    Layout("one host", _LAPTOP, 0, (2, 3, 4, 6, 8, 12, 16, 24, 32)),
    Layout("hosts of 8 ranks", _RACK, 8, (16, 24, 32, 48, 64)),
    Layout("hosts of one rank", _RACK, 1, (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
)
"""The layouts that the table tells apart."""

Times = Mapping[tuple[Layout, int], Sequence[Mapping[str, float]]]
"""For each layout and world, the times of all algorithms for each of `SIZES`."""

# The ways to let layouts share rows, each with the conditions of the rows; the first conditions go before the others.
_ONE, _SEVERAL, _EACH = LAYOUTS
_ANYWHERE: Final[Rule] = Rule(Collective.BARRIER, "")
_ON_ONE_HOST: Final[Rule] = replace(_ANYWHERE, max_hosts=1)
_ON_FULL_HOSTS: Final[Rule] = replace(_ANYWHERE, min_hosts=2, min_ranks_per_host=2)
_GROUPINGS: Final[tuple[tuple[tuple[tuple[Layout, ...], Rule], ...], ...]] = (
    ((LAYOUTS, _ANYWHERE),),
    (((_ONE,), _ON_ONE_HOST), ((_SEVERAL, _EACH), _ANYWHERE)),
    (((_SEVERAL,), _ON_FULL_HOSTS), ((_ONE, _EACH), _ANYWHERE)),
    (((_ONE,), _ON_ONE_HOST), ((_SEVERAL,), _ON_FULL_HOSTS), ((_EACH,), _ANYWHERE)),
)


@functools.cache
def predict(algorithm: Algorithm, layout: Layout, world_size: int, nbytes: int) -> float:
    """Return the seconds of a call, with as many segments as a selector would choose."""
    network = layout.network.with_ranks_per_host(layout.neighbours(world_size))
    segments = default_segments(algorithm, nbytes, world_size)
    return simulate(algorithm, world_size, nbytes, network, segments=segments).time_s


def model_rules(
    predicted: Callable[[Algorithm, Layout, int, int], float] = predict, tolerance: float = TOLERANCE
) -> list[Rule]:
    """Return the rows of a table for every collective.

    Parameters
    ----------
    predicted
        Tells the seconds of an algorithm in a layout and world for a size; by default the simulator does.
    tolerance
        The loss against the best that is taken for the sake of fewer rows.

    Returns
    -------
    list of Rule
        For each collective rows for reproducible calls and for uneven blocks, where not all its algorithms serve these, and then
        the rows for all calls.
    """
    rules: list[Rule] = []
    for collective in Collective:
        own = {each.name: each for each in BUILTIN if each.collective is collective}
        sizes = (0,) if collective is Collective.BARRIER else SIZES
        times = {
            (layout, world): [
                {
                    each.name: predicted(each, layout, world, size)
                    for each in candidates(own.values(), world, layout.neighbours(world))
                }
                for size in sizes
            ]
            for layout in LAYOUTS
            for world in layout.worlds
        }
        for kind in kinds(collective, own):
            chosen = {
                place: [{name: seconds for name, seconds in case.items() if name in kind.names} for case in cases]
                for place, cases in times.items()
            }
            rules += _fewest_rows(collective, sizes, chosen, kind, tolerance)
    return rules


def _fewest_rows(collective: Collective, sizes: Sequence[int], times: Times, kind: Kind, tolerance: float) -> list[Rule]:
    """Return the fewest rows that lose no more than is allowed, over all ways to let layouts share them."""
    found: list[list[Rule]] = []
    for grouping in _GROUPINGS:
        rows: list[Rule] | None = []
        for layouts, conditions in grouping:
            here = {place: cases for place, cases in times.items() if place[0] in layouts}
            some = _rows_of_layouts(collective, sizes, here, conditions, kind, tolerance)
            rows = None if rows is None or some is None else rows + some
        if rows is not None:
            found.append(rows)
    return min(found, key=len)


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring worlds that share rows."""

    places: tuple[tuple[Layout, int], ...]
    found: tuple[Range, ...]


def _rows_of_layouts(
    collective: Collective,
    sizes: Sequence[int],
    times: Times,
    conditions: Rule,
    kind: Kind,
    tolerance: float,
) -> list[Rule] | None:
    """Return the fewest rows for some layouts together: for all worlds alike, or with rows of their own for powers of two."""
    worlds = sorted({world for _, world in times})
    powers = [world for world in worlds if world & (world - 1) == 0]
    together = _blocks(times, worlds, tolerance)
    apart = [_blocks(times, some, tolerance) for some in (powers, [world for world in worlds if world not in powers])]
    options: list[list[tuple[list[_Block], bool]]] = []
    if together is not None:
        options.append([(together, False)])
    if apart[0] is not None and apart[1] is not None:
        options.append([(apart[0], True), (apart[1], False)])
    if not options:
        return None
    best = min(options, key=lambda option: sum(len(block.found) for blocks, _ in option for block in blocks))
    rows = []
    for blocks, power_of_two in best:
        for block in blocks:
            largest = None if block is blocks[-1] else max(world for _, world in block.places)
            for each in block.found:
                last = each.last == len(sizes) - 1
                rows.append(
                    replace(
                        conditions,
                        collective=collective,
                        algorithm=each.name,
                        max_bytes=None if last else math.isqrt(sizes[each.last] * sizes[each.last + 1]),
                        max_world=largest,
                        reason=_reason(collective, each, block, sizes, times, kind),
                        power_of_two=power_of_two,
                        reproducible=kind.reproducible,
                        uneven=kind.uneven,
                    )
                )
    return rows


def _blocks(times: Times, worlds: Sequence[int], tolerance: float) -> list[_Block] | None:
    """Divide worlds into neighbours that share rows, so that there are as few rows as possible; None where that cannot be."""
    best: list[tuple[int, list[_Block]] | None] = [(0, [])]
    for stop in range(1, len(worlds) + 1):
        options: list[tuple[int, list[_Block]]] = []
        for start in range(stop):
            before = best[start]
            block = _block(times, worlds[start:stop], tolerance)
            if before is not None and block is not None:
                options.append((before[0] + len(block.found), [*before[1], block]))
        best.append(min(options, key=lambda option: option[0], default=None))
    last = best[-1]
    return None if last is None else last[1]


def _block(times: Times, worlds: Collection[int], tolerance: float) -> _Block | None:
    places = tuple(place for place in times if place[1] in worlds)
    worst: list[dict[str, float]] = []
    for cases in zip(*(times[place] for place in places), strict=True):
        lost = [losses(case) for case in cases]
        names = set(lost[0]).union(*lost)
        # An algorithm that cannot serve one of the worlds is passed over there, and the row would not hold what it promises.
        worst.append({name: max(loss.get(name, math.inf) for loss in lost) for name in names})
    found = ranges(worst, tolerance)
    return None if found is None else _Block(places, tuple(found))


def _reason(collective: Collective, each: Range, block: _Block, sizes: Sequence[int], times: Times, kind: Kind) -> str:
    """Quote the model where the row's range is in the middle, which may be far from the call that asks."""
    middle = (each.first + each.last) // 2
    layout, world = sorted(block.places, key=lambda place: place[1])[len(block.places) // 2]
    case = times[layout, world][middle]
    size = "" if collective is Collective.BARRIER else f"{_bytes_text(sizes[middle])}, "
    text = f"on the model's networks, such as {size}{world} ranks, {layout.name}{kind.words}: {time_text(case[each.name])}"
    others = {name: seconds for name, seconds in case.items() if name != each.name}
    if not others:
        return f"{text}; there is no other"
    other = min(others, key=lambda name: others[name])
    if others[other] < case[each.name]:
        return f"{text}; near enough to {other}, {time_text(others[other])}, to need no row of its own"
    return f"{text}; next is {other}, {time_text(others[other])}"


def _bytes_text(nbytes: int) -> str:
    units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
    unit, name = next(each for each in units if nbytes >= each[0])
    return f"{nbytes // unit} {name}"
