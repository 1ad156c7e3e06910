"""``manyhands simulate``: how long a collective would take, on a network and in a world that need not exist."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.console import print_json, print_table
from manyhands.cli.sizes import parse_bytes
from manyhands.errors import ManyHandsError, UsageError
from manyhands.schedule.steps import Collective

if TYPE_CHECKING:
    from manyhands.algorithms.registry import Algorithm
    from manyhands.simulation import Network, Outcome

__all__ = ["simulate"]


def simulate(
    collective: Annotated[str, typer.Argument(metavar="COLLECTIVE", help="Such as all_reduce.", show_default=False)],
    ranks: Annotated[int, typer.Option(help="How many ranks.", show_default=False)],
    nbytes: Annotated[
        str,
        typer.Option(
            "--bytes",
            help="The bytes of the vector, or of all blocks together (all_to_all: what one rank gives away), such as 64KiB or 1e6.",
        ),
    ] = "0",
    network: Annotated[str, typer.Option(help="A preset or a TOML file.", metavar="NAME|FILE")] = "fat-tree",
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="The algorithm, or 'all' for all that fit; if not given, the one that a group would use.", show_default=False
        ),
    ] = None,
    root: Annotated[int, typer.Option(help="The root, for a collective that has one.")] = 0,
    segments: Annotated[
        int | None, typer.Option(help="Into how many segments a vector or block is cut.", show_default=False)
    ] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="How many neighbouring ranks share a host, instead of the network's.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a collective on a virtual clock: every message, every link that messages share, in worlds of 65,536 ranks and more."""
    # Imported here, so that the other commands do not wait for it.
    from manyhands.cli.candidates import configured_ranks_per_host, network_of

    kind = _collective(collective)
    size = parse_bytes(nbytes)
    if kind is Collective.BARRIER:
        size = 0
    where, where_name = network_of(network)
    ranks_per_host = ranks_per_host or configured_ranks_per_host()
    if ranks_per_host is not None:
        where = where.with_ranks_per_host(ranks_per_host)
    installed = _installed()
    algorithms = [each for each in installed if each.collective is kind]
    chosen = _chosen(kind, size, ranks, where)
    outcomes = _run(
        _wanted(algorithms, algorithm, chosen, ranks, where), ranks, size, where, root, segments, algorithm == "all"
    )
    fastest = min(outcomes, key=lambda each: each[1].time_s)[0].name
    if as_json:
        print_json(
            {
                "collective": kind.value,
                "ranks": ranks,
                "bytes": size,
                "algorithms": [
                    {
                        "name": each.name,
                        "time_s": outcome.time_s,
                        "steps": outcome.steps,
                        "bytes_per_rank": int(outcome.bytes_per_rank)
                        if outcome.bytes_per_rank.is_integer()
                        else outcome.bytes_per_rank,
                        "segments": outcome.segments,
                        "method": outcome.method,
                    }
                    for each, outcome in outcomes
                ],
                "chosen": chosen.name,
                "fastest": fastest,
            }
        )
        return
    print(f"{kind.value} of {size:,} bytes, {ranks:,} ranks, network {where_name}")
    if where.summary:
        print(f"({where.summary})")
    print()
    print_table(
        ("algorithm", "time", "steps", "bytes per rank", "segments", "method"),
        [_row(*each) for each in sorted(outcomes, key=_time)],
    )
    print(f"\na group would use {chosen.name}")


def _time(result: tuple[Algorithm, Outcome]) -> float:
    return result[1].time_s


def _row(algorithm: Algorithm, outcome: Outcome) -> tuple[str, ...]:
    numbers = (
        f"{outcome.time_s * 1e6:,.3f} us",
        f"{outcome.steps:,}",
        f"{outcome.bytes_per_rank:,.0f}",
        f"{outcome.segments:,}",
    )
    return algorithm.name, *numbers, outcome.method


def _collective(name: str) -> Collective:
    named = {each.value: each for each in Collective}
    meant = name.replace("-", "_")
    if meant not in named:
        raise UsageError(f"{name!r} is no collective; expected is one of: {', '.join(named)}")
    return named[meant]


def _installed() -> list[Algorithm]:
    """Return the algorithms of manyhands and of the plugins that the configuration allows."""
    from manyhands.algorithms.registry import BUILTIN
    from manyhands.config import load
    from manyhands.plugins import get_plugin_manager

    manager = get_plugin_manager()
    manager.switch(load().settings.plugins)
    return [*BUILTIN, *manager.algorithms()]


def _chosen(kind: Collective, nbytes: int, ranks: int, network: Network) -> Algorithm:
    """Return the algorithm that a group would use."""
    from manyhands.cli.candidates import configured_selector

    neighbours = network.neighbours(ranks)
    known = neighbours if ranks % neighbours == 0 else 1
    return configured_selector().choose(kind, nbytes, ranks, ranks_per_host=known).algorithm


def _wanted(
    algorithms: list[Algorithm], name: str | None, chosen: Algorithm, ranks: int, network: Network
) -> Iterable[Algorithm]:
    if name is None:
        return [chosen]
    if name == "all":
        neighbours = network.neighbours(ranks)
        hosts = 1 < neighbours < ranks and ranks % neighbours == 0
        return [each for each in algorithms if hosts or not each.by_host]
    named = [each for each in algorithms if each.name == name.replace("-", "_")]
    if not named:
        known = ", ".join(each.name for each in algorithms)
        raise UsageError(f"there is no algorithm {name!r} for {chosen.collective.value}; expected is one of: {known}, or all")
    return named


def _run(
    algorithms: Iterable[Algorithm], ranks: int, nbytes: int, network: Network, root: int, segments: int | None, lenient: bool
) -> list[tuple[Algorithm, Outcome]]:
    """Simulate algorithms; with ``lenient``, leave out those that cannot be, unless none is left."""
    from manyhands.simulation import simulate as run

    # There are millions of numbers in large lists, and no circles among them: to look for some costs a quarter of the time.
    gc.disable()
    outcomes: list[tuple[Algorithm, Outcome]] = []
    failure: ManyHandsError | None = None
    for each in algorithms:
        try:
            outcomes.append((each, run(each, ranks, nbytes, network, root=root, segments=segments)))
        except ManyHandsError as error:
            if not lenient:
                raise
            failure = error
            print(f"note: {each.name} is left out: {error}", file=sys.stderr)
    if failure is not None and not outcomes:
        raise failure
    return outcomes
