"""``oneaccord show pipeline``: a schedule of a pipeline as a picture."""

from __future__ import annotations

import shutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from oneaccord.errors import UsageError
from oneaccord_parallel.pipeline.schedules import schedule, schedules

__all__ = ["show_pipeline"]


def show_pipeline(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A schedule such as 1f1b.", show_default=False)] = None,
    stages: Annotated[int, typer.Option(help="How many ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Into how many parts the batch is divided.")] = 8,
    virtual: Annotated[
        int | None, typer.Option(help="How many stages each rank has, for interleaved_1f1b.", show_default=False)
    ] = None,
    forward: Annotated[str, typer.Option(help="How long a forward pass takes.")] = "1",
    backward: Annotated[str, typer.Option(help="How long a whole backward pass takes.")] = "2",
    weight: Annotated[
        str | None,
        typer.Option(help="The share of that for the gradients of weights; a half if not given.", show_default=False),
    ] = None,
    message: Annotated[str, typer.Option(help="How long a message between two ranks takes.")] = "0",
    svg: Annotated[
        Path | None, typer.Option(help="Write the picture to this file.", metavar="FILE", show_default=False)
    ] = None,
) -> None:
    """Draw the schedule of a pipeline, and show its cost.

    Pictures go to the terminal or to a file. Without a name, all schedules are listed.
    """
    if name is None:
        known = schedules()
        widest = max(map(len, known))
        for each, summary in known.items():
            print(f"{each:{widest}}  {summary}")
        print("\noneaccord show pipeline 1f1b draws it")
        return
    plan = schedule(name, stages, microbatches, virtual)
    of_weight = None if weight is None else _time("--weight", weight)
    times = (_time("--forward", forward), _time("--backward", backward), of_weight, _time("--message", message))
    if svg is None:
        width = shutil.get_terminal_size((80, 24)).columns
        print(plan.text(*times, width=width, colour=sys.stdout.isatty()), end="")
        return
    try:
        svg.write_text(plan.svg(*times), encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"--svg {svg} cannot be written: {error.strerror}; name another file") from None
    print(f"wrote {svg}")


def _time(option: str, text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"{option} {text}: a number is expected, such as 1, 2.5 or 5/2") from None
