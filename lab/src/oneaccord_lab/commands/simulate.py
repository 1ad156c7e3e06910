"""``oneaccord simulate``: how long a collective would take, on a network and in a world that need not exist."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from oneaccord.cli.console import RANKS, print_json, print_table
from oneaccord.errors import InvalidWorldSizeError, OneAccordError, UsageError
from oneaccord.schedule.steps import Collective

if TYPE_CHECKING:
    from oneaccord.config.select import Choice
    from oneaccord.config.select.rules import Call
    from oneaccord.schedule.algorithms.registry import Algorithm
    from oneaccord_lab.commands.predictions import Question
    from oneaccord_lab.simulation import Outcome

__all__ = ["simulate"]


def simulate(
    collective: Annotated[
        str,
        typer.Argument(metavar="COLLECTIVE", help="Such as all_reduce; or start, for the start of a job.", show_default=False),
    ],
    ranks: Annotated[int, typer.Option(*RANKS, help="How many ranks.", show_default=False)],
    nbytes: Annotated[
        str,
        typer.Option(
            "--bytes",
            help="The bytes of the vector, or of all blocks together (all_to_all: the blocks that one rank sends), such as 64KiB or 1e6.",
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
    """Predict times on networks and worlds that need not exist.

    A collective runs on a virtual clock: every message, every link that messages share, in worlds of 65,536 ranks and more.
    """
    # Imported here, so that the other commands do not wait for it.
    from oneaccord_lab.commands.configured import configured
    from oneaccord_lab.commands.predictions import Question, figures, print_choice, print_heading, written
    from oneaccord_lab.simulation import MAX_RANKS

    if collective == "start":
        from oneaccord_lab.commands.starts import print_start

        print_start(ranks, ranks_per_host or 1, as_json=as_json)
        return
    kind = _collective(collective)
    setup = configured()
    if not 1 <= ranks <= MAX_RANKS:
        raise InvalidWorldSizeError(f"-n {ranks}: give a number of ranks from 1 to {MAX_RANKS:,}")
    hosts = setup.ranks_per_host if ranks_per_host is None else ranks_per_host
    question = Question.of(kind, nbytes, ranks, network, root=root, ranks_per_host=hosts)
    call = question.call
    choice = setup.selector.choose(kind, call.nbytes, ranks, ranks_per_host=call.ranks_per_host)
    wanted = _wanted(setup.selector.algorithms(kind), algorithm, choice.algorithm, call)
    outcomes = _run(wanted, question, segments, choice, algorithm == "all")
    by_time = sorted(outcomes, key=lambda each: each[1].time_s)
    if as_json:
        print_json(
            {
                "collective": kind.value,
                "ranks": ranks,
                "bytes": call.nbytes,
                "algorithms": [written(*each) for each in outcomes],
                "chosen": choice.algorithm.name,
                "reason": choice.reason,
                "fastest": by_time[0][0].name,
            }
        )
        return
    print_heading(question)
    print_table(
        ("algorithm", "time", "steps", "sent per rank", "segments", "method"),
        [(each.name, *figures(outcome), outcome.method) for each, outcome in by_time],
    )
    print_choice(choice, outcomes)


def _collective(name: str) -> Collective:
    named = {each.value: each for each in Collective}
    meant = name.replace("-", "_")
    if meant not in named:
        from oneaccord.config.plugins.installed import nearest

        close = nearest(name, named)
        hint = f"did you mean {close!r}? Expected" if close else "expected"
        raise UsageError(f"{name!r} is not a collective; {hint} one of: {', '.join(named)}")
    return named[meant]


def _wanted(algorithms: Sequence[Algorithm], name: str | None, chosen: Algorithm, call: Call) -> list[Algorithm]:
    from oneaccord.config.select import candidates

    if name is None:
        return [chosen]
    if name == "all":
        return candidates(algorithms, call.world_size, call.ranks_per_host)
    named = [each for each in algorithms if each.name == name.replace("-", "_")]
    if not named:
        known = ", ".join(each.name for each in algorithms)
        raise UsageError(f"there is no algorithm {name!r} for {chosen.collective.value}; expected one of: {known}, or all")
    return named


def _run(
    algorithms: Iterable[Algorithm], question: Question, segments: int | None, choice: Choice, lenient: bool
) -> list[tuple[Algorithm, Outcome]]:
    """Simulate algorithms; with ``lenient``, leave out those that cannot be, unless none is left."""
    from oneaccord_lab.commands.predictions import segments_of
    from oneaccord_lab.simulation import simulate as run

    size, nbytes = question.call.world_size, question.call.nbytes
    outcomes: list[tuple[Algorithm, Outcome]] = []
    failure: OneAccordError | None = None
    for each in algorithms:
        try:
            with _uncollected():
                cut = segments or segments_of(each, choice, nbytes, size)
                outcome = run(each, size, nbytes, question.network, root=question.root, segments=cut)
        except OneAccordError as error:
            if not lenient:
                raise
            failure = error
            print(f"note: {each.name} is left out: {error}", file=sys.stderr)
        else:
            outcomes.append((each, outcome))
    if failure is not None and not outcomes:
        raise failure
    return outcomes


@contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no circles of objects in a block: among millions of numbers in large lists there are none, and it takes long."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
