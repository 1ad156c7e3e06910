"""``oneaccord explain``: who waits for whom, and what differs, of the files that flight recorders wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from oneaccord.errors import UsageError, printable
from oneaccord.explain.reading import Job, read_jobs
from oneaccord.explain.story import tell
from oneaccord.explain.timeline import how_exact, timeline

__all__ = ["explain"]


def explain(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="The folder with the files; from several hosts several folders.", show_default=False
        ),
    ],
    job: Annotated[
        str | None,
        typer.Option(
            help="Which job, where there are files of several; by default the newest.", metavar="NAME", show_default=False
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a timeline of the last calls to this file, for ui.perfetto.dev.", metavar="FILE", show_default=False
        ),
    ] = None,
) -> None:
    """Say who waits for whom, in which call and line, and what differs between the ranks.

    Reads the files that the ranks of a job write with `oneaccord run --record DIR`, or with the setting recorder.directory: when the job fails, when
    a rank gets SIGUSR1, and at the end.
    """
    jobs, left_out = read_jobs(paths)
    for each in left_out:
        print(printable(f"oneaccord explain: left out {each}"), file=sys.stderr)
    chosen = _chosen(jobs, job)
    print(printable(tell(chosen)), end="")
    others = [each.name for each in jobs if each is not chosen]
    if others and job is None:
        names = printable(", ".join(others[:8]))
        print(f"there are files of {len(others)} older job{'s' if len(others) > 1 else ''} as well; see --job: {names}")
    if trace is not None:
        text, count = timeline(chosen)
        try:
            trace.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--trace {trace} cannot be written: {error.strerror}") from None
        print(f"the timeline of the last {count:,} calls is in {trace}; open it at ui.perfetto.dev; {how_exact(chosen.dumps)}")


def _chosen(jobs: list[Job], name: str | None) -> Job:
    found = [each for each in jobs if name is None or each.name == name]
    if not found:
        raise UsageError(f"there is no job {name!r}; there are {', '.join(each.name for each in jobs)}")
    return found[0]
