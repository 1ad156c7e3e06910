"""``oneaccord show``: an algorithm as a picture, and which one a call takes and why."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oneaccord.cli.console import RANKS, columns, print_table
from oneaccord.errors import InvalidRankError, InvalidWorldSizeError, UsageError
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.steps import Collective
from oneaccord_lab.commands.files import write_text

if TYPE_CHECKING:
    from oneaccord.schedule.algorithms.registry import Algorithm
    from oneaccord_lab.drawing.terminal import Line

__all__ = ["show"]

_MOST_RANKS = 64
_WORLD = 4
_PREDICTED_WORLD = 16
_BYTES = "1MiB"


def show(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="An algorithm such as ring_all_reduce, or a collective.", show_default=False),
    ] = None,
    collective: Annotated[
        str | None,
        typer.Argument(metavar="COLLECTIVE", help="The collective; NAME is as in the config.", show_default=False),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(
            *RANKS, help=f"How many ranks; {_WORLD} to draw, {_PREDICTED_WORLD} to predict if not given.", show_default=False
        ),
    ] = None,
    root: Annotated[int, typer.Option(help="The root, for a collective that has one.")] = 0,
    segments: Annotated[
        int | None, typer.Option(help="Into how many segments a vector or block is cut.", show_default=False)
    ] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="How many neighbouring ranks share a host.", show_default=False)
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Write the picture to this file.", metavar="FILE", show_default=False)
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Show the algorithms for a call, and the reasons for and against each.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot predicted time against bytes, as .svg or .png.", metavar="FILE", show_default=False),
    ] = None,
    nbytes: Annotated[
        str | None,
        typer.Option("--bytes", help=f"The size of the call, such as 64KiB; {_BYTES} if not given.", show_default=False),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="The network to predict on: a preset or a TOML file.", metavar="NAME|FILE", show_default=False),
    ] = None,
    reproducible: Annotated[bool, typer.Option("--reproducible", help="Ask for the one order of reduction.")] = False,
    uneven: Annotated[bool, typer.Option("--uneven", help="The blocks of ranks differ in size.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw an algorithm, or say which one a call takes and why.

    Pictures go to the terminal or to a file. Without a name, all algorithms are listed; with that of a collective, its own.
    """
    predicting = why or plot is not None
    size = (_PREDICTED_WORLD if predicting else _WORLD) if world is None else world
    _check_numbers(size, root, segments, ranks_per_host)
    wanted = {"--svg": svg is not None, "--why": why, "--plot": plot is not None}
    modes = [option for option, given in wanted.items() if given]
    if len(modes) > 1:
        raise UsageError(f"{' and '.join(modes)} were given; expected one of them: each shows something else")
    # Imported here, so that the other commands do not wait for it.
    from oneaccord_lab.commands.configured import configured

    setup = configured()
    algorithms = setup.algorithms
    found = _find(name, collective, algorithms) if name is not None else None
    if predicting:
        if found is None:
            raise UsageError(f"{modes[0]} needs the name of a collective, such as: oneaccord show all_reduce {modes[0]}")
        # Imported here, so that a picture does not wait for it.
        from oneaccord_lab.commands.predictions import Question, explain

        hosts = setup.ranks_per_host if ranks_per_host is None else ranks_per_host
        question = Question.of(
            found if isinstance(found, Collective) else found.collective, nbytes or _BYTES, size, network,
            root=root, ranks_per_host=hosts, reproducible=reproducible, even=not uneven,
        )  # fmt: skip
        if plot is not None:
            from oneaccord_lab.commands.plots import write_plot

            write_plot(question, algorithms, plot, selector=setup.selector)
            print(f"wrote {plot}")
        else:
            explain(question, setup.selector, as_json=as_json)
        return
    only_predicting = {
        "--json": as_json,
        "--bytes": nbytes,
        "--network": network,
        "--reproducible": reproducible,
        "--uneven": uneven,
    }
    for option, given in only_predicting.items():
        if given:
            raise UsageError(f"{option} needs --why{'' if option == '--json' else ' or --plot'}; add that")
    if found is None or isinstance(found, Collective):
        if svg is not None:
            raise UsageError(f"--svg needs the name of an algorithm; known are: {_listed(algorithms, found)}")
        _list(algorithms, found)
        return
    _draw(found, size, root, segments, ranks_per_host, svg)


_MOST_SEGMENTS = 64
"""The most that a picture could show."""


def _check_numbers(size: int, root: int, segments: int | None, ranks_per_host: int | None) -> None:
    from oneaccord_lab.simulation import MAX_RANKS

    if not 1 <= size <= MAX_RANKS:
        raise InvalidWorldSizeError(f"-n {size}: expected 1 to {MAX_RANKS:,}")
    if not 0 <= root < size:
        raise InvalidRankError(f"--root {root}: there is no such rank; a world of {size} has the ranks 0 to {size - 1}")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise UsageError(f"--ranks-per-host {ranks_per_host}: expected 1 or more")
    if segments is not None and not 1 <= segments <= _MOST_SEGMENTS:
        raise UsageError(f"--segments {segments}: expected 1 to {_MOST_SEGMENTS}")


def _find(name: str, collective: str | None, algorithms: Sequence[Algorithm]) -> Algorithm | Collective:
    """Return the meaning of a name: ``ring_all_reduce``, ``ring all_reduce`` or ``all_reduce``."""
    given = name if collective is None else f"{name}_{collective}"
    named: dict[str, Algorithm | Collective] = {_full_name(algorithm): algorithm for algorithm in algorithms}
    named.update({each.value: each for each in Collective})
    meant = given.replace("-", "_")
    if meant not in named:
        near = difflib.get_close_matches(meant, named, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UsageError(f"there is no algorithm or collective {given!r}{hint} Known are: {', '.join(sorted(named))}")
    return named[meant]


def _full_name(algorithm: Algorithm) -> str:
    return f"{algorithm.name}_{algorithm.collective.value}"


def _listed(algorithms: Sequence[Algorithm], collective: Collective | None) -> str:
    return ", ".join(_full_name(each) for each in algorithms if collective in (None, each.collective))


def _list(algorithms: Sequence[Algorithm], collective: Collective | None) -> None:
    rows = [(_full_name(each), each.summary) for each in algorithms if collective in (None, each.collective)]
    print_table(("algorithm", "summary"), rows)
    if rows:
        compared = (collective or Collective.ALL_REDUCE).value
        print(f"\noneaccord show {rows[0][0]} draws it\noneaccord show {compared} --why compares")


def _draw(
    algorithm: Algorithm, size: int, root: int, segments: int | None, ranks_per_host: int | None, svg: Path | None
) -> None:
    from oneaccord_lab.drawing.svg import svg_of
    from oneaccord_lab.drawing.terminal import text_of
    from oneaccord_lab.drawing.timeline import timeline_of

    if size > _MOST_RANKS:
        raise InvalidWorldSizeError(
            f"-n {size}: a picture of more than {_MOST_RANKS} ranks shows nothing; draw fewer, or try oneaccord simulate"
        )
    promise = PROMISES[algorithm.collective]
    if root and not (promise.input_on_root or promise.output_on_root):
        raise InvalidRankError(f"--root {root}: {algorithm.collective.value} has no root; leave --root out")
    hosts = _ranks_per_host(algorithm, size, ranks_per_host)
    cut = segments or (4 if algorithm.pipelined else 1)
    timeline = timeline_of([algorithm.schedule(rank, size, root, cut, hosts) for rank in range(size)])
    if svg is None:
        _print(text_of(timeline, summary=algorithm.summary, width=columns()))
        return
    write_text("--svg", svg, svg_of(timeline, summary=algorithm.summary, ranks_per_host=hosts))
    print(f"wrote {svg}")


def _ranks_per_host(algorithm: Algorithm, size: int, given: int | None) -> int:
    if not algorithm.by_host:
        return given or 1
    chosen = given or (size // 2 if size % 2 == 0 else size)
    if size % chosen:
        raise UsageError(
            f"--ranks-per-host {chosen}: {_full_name(algorithm)} needs equally many ranks on every host, but {size} ranks "
            f"cannot be divided so"
        )
    return chosen


def _print(lines: Sequence[Line]) -> None:
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console()
        for line in lines:
            console.print(Text.assemble(*((piece, colour or "") for piece, colour in line)), soft_wrap=True)
        return
    from oneaccord_lab.drawing.terminal import in_ascii

    text = "\n".join("".join(piece for piece, _ in line) for line in lines)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = in_ascii(text)
    print(text)
