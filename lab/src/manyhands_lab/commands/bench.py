"""``manyhands bench``: backends side by side on this machine, or the algorithms of one, and a table that makes it take the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.console import RANKS
from manyhands.errors import ConfigError, InvalidWorldSizeError, UsageError

__all__ = ["bench"]


def bench(
    collective: Annotated[
        str,
        typer.Argument(
            metavar="COLLECTIVE", help="What to measure: all_reduce, sendrecv, pingpong, ...; several with commas; or all."
        ),
    ] = "all",
    ranks: Annotated[int, typer.Option(*RANKS, help="How many ranks to start on this host.")] = 4,
    backends: Annotated[
        str | None,
        typer.Option(
            "--backends",
            "--backend",
            metavar="NAMES",
            help="The backends, such as tcp,shm,gloo,mpi; shm+symmetric takes its arrays from group.empty, mpi+raw calls mpi4py "
            "itself. By default that of the configuration alone.",
            show_default=False,
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="The sizes of the calls, such as 8,1KiB,1MiB; by default 8 B to 128 MiB.", show_default=False),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="The dtype of the arrays; float32 by default.", show_default=False)] = None,
    op: Annotated[str | None, typer.Option(help="The reduction; sum by default.", show_default=False)] = None,
    iterations: Annotated[
        int | None,
        typer.Option(help="Timed calls of each backend at each size; by default as --budget allows.", show_default=False),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Calls before each batch that are not timed; by default 0 to 3.", show_default=False)
    ] = None,
    budget_s: Annotated[
        float | None,
        typer.Option(
            "--budget",
            help="Seconds that measuring may take; what is not begun by then is not measured. By default 4 for each size of each "
            "collective and at least 60; 60 with --tune.",
            show_default=False,
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds after which a call has failed.")] = 20.0,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the rows as JSON; - for standard output.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw time against bytes, as .svg or .png.", show_default=False)
    ] = None,
    limits: Annotated[
        bool,
        typer.Option("--limits", help="Measure in the same run what the machine itself allows, and each row's share of it."),
    ] = False,
    algorithms: Annotated[
        bool, typer.Option("--algorithms", help="Compare the algorithms of one backend, not backends.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="As --algorithms, and write a table that makes manyhands take what was fastest.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where --tune writes the table; tuned.toml by default.", show_default=False)
    ] = None,
    config: Annotated[str | None, typer.Option(help="The configuration file.", metavar="FILE", show_default=False)] = None,
) -> None:
    """Measure backends, or algorithms, on ranks of this host.

    All are measured in the same processes, in turn, with every result checked. Sizes and bandwidths are those of nccl-tests; the last column compares a backend with the first. Ends with exit code 1 where
    a backend failed or computed something wrong.
    """
    if ranks < 1:
        raise InvalidWorldSizeError(f"-n {ranks}: a job has at least one rank; give -n 1 or more")
    for name, number in (("--budget", budget_s), ("--timeout", timeout_s)):
        if number is not None and not 0 < number < float("inf"):
            raise UsageError(f"{name} {number:g}: expected a positive number of seconds")
    if iterations is not None and iterations < 1:
        raise UsageError(f"--iterations {iterations}: expected at least 1")
    if warmup is not None and warmup < 0:
        raise UsageError(f"--warmup {warmup}: expected 0 or more")
    if config is not None and not Path(config).is_file():
        raise ConfigError(
            f"--config {config}: there is no such file in {Path.cwd()}", file="argument", key="config", value=config
        )
    if output is not None and not tune:
        raise UsageError("--output is where --tune writes its table, and --tune was not given: give both, or neither")
    file = None if config is None else str(Path(config).resolve())
    nbytes = None if sizes is None else _sizes(sizes)
    if algorithms or tune:
        from manyhands_lab.commands.bench_algorithms import compare_algorithms

        foreign = {
            "--dtype": dtype,
            "--op": op,
            "--iterations": iterations,
            "--warmup": warmup,
            "--plot": plot,
            "--limits": limits or None,
        }
        for name, value in foreign.items():
            if value is not None:
                raise UsageError(
                    f"{name} is for comparing backends, and --algorithms or --tune compares algorithms: leave one out"
                )
        target = (output or Path("tuned.toml")) if tune else None
        if target is not None and output is None and target.exists():
            raise UsageError(
                f"{target} is there already, with rows that may have taken long to measure: name another file, or this one, by "
                "--output"
            )
        compare_algorithms(collective, ranks, backends, file, nbytes, budget_s or 60.0, target, json_file)
        return
    from manyhands_lab.commands.bench_backends import Request, compare_backends

    request = Request(
        collective,
        ranks,
        backends,
        file,
        nbytes,
        dtype or "float32",
        op or "sum",
        iterations,
        warmup,
        budget_s,
        timeout_s,
        limits,
    )
    raise typer.Exit(compare_backends(request, json_file, plot))


def _sizes(text: str) -> list[int]:
    from manyhands.common.units import parse_bytes

    return sorted({parse_bytes(word.strip()) for word in text.split(",")})
