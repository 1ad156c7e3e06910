"""A progress bar for long work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]

_LARGE_BYTES = 256 << 20


@contextmanager
def progress_bar(what: str, nbytes: int, wanted: bool | None, rank: int) -> Iterator[Callable[[int], object]]:
    """Show how much is done on standard error; ``wanted=None``: if it is much, and that is a terminal. Rank 0 alone shows it.

    Yields
    ------
    callable
        Called with the number of additional bytes that are done.
    """
    shown = wanted if wanted is not None else nbytes >= _LARGE_BYTES and sys.stderr.isatty()
    if not shown or rank != 0:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda count: bar.advance(task, count)
