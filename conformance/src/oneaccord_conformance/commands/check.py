"""``oneaccord check``: find out whether a backend keeps the contract."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from oneaccord import UsageError

if TYPE_CHECKING:
    from oneaccord_conformance.registry import Check
    from oneaccord_conformance.running import Result

__all__ = ["check"]


def check(
    backend: Annotated[str | None, typer.Argument(metavar="NAME", help="The backend.", show_default=False)] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="How many ranks worlds have, from 2 on.")] = 4,
    config: Annotated[
        Path | None, typer.Option(help="The configuration file; without one, none is read.", metavar="FILE", show_default=False)
    ] = None,
    chapter: Annotated[
        list[str] | None, typer.Option(help="Only this chapter; may be given again.", metavar="CHAPTER", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this check; may be given again.", metavar="CHECK", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Try fewer sizes and dtypes.")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Print each check with its promise, and at once why it failed.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the checks, and run none.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit's XML.", metavar="FILE", show_default=False)] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write the report as JSON; - for standard output.", metavar="FILE", show_default=False),
    ] = None,
) -> None:
    """Check that a backend keeps the contract of oneaccord.

    Ends with exit code 0 if it does, and 1 if a check failed. Checks are skipped only if the backend declares a lack in its spec.
    Ctrl-C ends it with the results so far.
    """
    from oneaccord_conformance.registry import choose

    checks = choose(chapter or [], only or [])
    if listed:
        for each in checks:
            print(f"{each.title:40} {each.promise}")
        return
    if backend is None:
        raise UsageError("no backend was given: `oneaccord check tcp`; `oneaccord doctor` lists those that are installed")
    if ranks < 2:
        raise UsageError(f"-n {ranks}: the checks need worlds of 2 ranks or more")
    if config is not None and not config.is_file():
        raise UsageError(f"--config {config}: there is no such file in {Path.cwd()}")
    from oneaccord_conformance.reports import as_json, as_junit, as_text
    from oneaccord_conformance.running import run_checks
    from oneaccord_conformance.threads import has_stuck_threads
    from oneaccord_conformance.worlds import WorldMaker

    worlds = WorldMaker(backend, None if config is None else str(config.resolve()), ranks, quick=quick)
    progress = _Progress(len(checks), verbose=verbose)
    try:
        report = run_checks(checks, worlds, progress.started, progress.finished)
    finally:
        progress.end()
    for file, text in ((junit, as_junit(report)), (Path(json_file) if json_file not in (None, "-") else None, as_json(report))):
        if file is not None:
            _write(file, text)
    print(as_json(report) if json_file == "-" else as_text(report), flush=True)
    fault = worlds.rest(1.0) if report.left else worlds.rest()  # after the report: a hanging world takes its time
    if fault:
        print(f"\nat the end: {fault}", file=sys.stderr)
    code = 128 + signal.SIGINT if report.left else 0 if report.conforms and not fault else 1
    if has_stuck_threads():
        # A world that a broken backend holds forever must not keep the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; name another file") from None


class _Progress:
    """A line on a terminal with the running check; with ``verbose``, a line for each check, on any output."""

    def __init__(self, total: int, *, verbose: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._verbose = verbose
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)
        self._bar.start()

    def started(self, check: Check) -> None:
        self._bar.update(self._task, description=check.title)

    def finished(self, result: Result) -> None:
        self._bar.advance(self._task)
        if self._verbose:
            line = f"{result.status:7} {result.took_s:6.2f} s  {result.check.title:36} {result.check.promise}"
            self._console.print(line)
            if result.status == "failed":
                self._console.print(indent(result.text, "  "))

    def end(self) -> None:
        self._bar.stop()
