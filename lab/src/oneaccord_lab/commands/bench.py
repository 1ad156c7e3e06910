"""``oneaccord bench``: backends side by side on this machine, or the algorithms of one, and a table that makes it take the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from oneaccord.errors import UsageError
from oneaccord_lab.commands.options import Config, JsonFile, Ranks, Timeout, at_least, seconds

__all__ = ["bench"]


def _option(*names: str, help: str, **more: Any) -> Any:  # noqa: A002 - as typer calls it
    """Return an option that need not be given."""
    return typer.Option(*names, help=help, show_default=False, **more)


_COLLECTIVE = typer.Argument(
    metavar="COLLECTIVE", help="What to measure: all_reduce, sendrecv, pingpong, ...; several with commas; or all."
)
_BACKENDS = _option(
    "--backends",
    "--backend",
    metavar="NAMES",
    help="The backends, such as tcp,shm,gloo,mpi; shm+symmetric takes its arrays from group.empty, mpi+raw calls mpi4py "
    "itself. By default that of the configuration alone.",
)
_SIZES = _option(help="The sizes of the calls, such as 8,1KiB,1MiB; by default 8 B to 128 MiB.")
_DTYPE = _option(help="The dtype of the arrays; float32 by default.")
_OP = _option(help="The reduction; sum by default.")
_ITERATIONS = _option(callback=at_least(1), help="Timed calls of each backend at each size; by default as --budget allows.")
_WARMUP = _option(callback=at_least(0), help="Calls before each batch that are not timed; by default 0 to 3.")
_BUDGET = _option(
    "--budget",
    callback=seconds,
    help="Seconds that measuring may take; what is not begun by then is not measured. By default 4 for each size of each "
    "collective and at least 60; 60 with --tune.",
)
_PLOT = _option(metavar="FILE", help="Draw time against bytes, as .svg or .png.")
_LIMITS = typer.Option("--limits", help="Measure in the same run what the machine itself allows, and each row's share of it.")
_ALGORITHMS = typer.Option("--algorithms", help="Compare the algorithms of one backend, not backends.")
_TUNE = typer.Option("--tune", help="As --algorithms, and write a table that makes oneaccord take what was fastest.")
_OUTPUT = _option(help="Where --tune writes the table; tuned.toml by default.")


def bench(
    collective: Annotated[str, _COLLECTIVE] = "all",
    ranks: Ranks = 4,
    backends: Annotated[str | None, _BACKENDS] = None,
    sizes: Annotated[str | None, _SIZES] = None,
    dtype: Annotated[str | None, _DTYPE] = None,
    op: Annotated[str | None, _OP] = None,
    iterations: Annotated[int | None, _ITERATIONS] = None,
    warmup: Annotated[int | None, _WARMUP] = None,
    budget_s: Annotated[float | None, _BUDGET] = None,
    timeout_s: Timeout = 20.0,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, _PLOT] = None,
    limits: Annotated[bool, _LIMITS] = False,
    algorithms: Annotated[bool, _ALGORITHMS] = False,
    tune: Annotated[bool, _TUNE] = False,
    output: Annotated[Path | None, _OUTPUT] = None,
    config: Config = None,
) -> None:
    """Measure backends, or algorithms, on ranks of this host.

    All are measured in the same processes, in turn, with every result checked. Sizes and bandwidths are those of nccl-tests; the last column compares a backend with the first. Ends with exit code 1 where
    a backend failed or computed something wrong.
    """
    if output is not None and not tune:
        raise UsageError("--output is where --tune writes its table, and --tune was not given: give both, or neither")
    nbytes = None if sizes is None else _sizes(sizes)
    if algorithms or tune:
        from oneaccord_lab.commands.bench_algorithms import compare_algorithms

        foreign = {"dtype": dtype, "op": op, "iterations": iterations, "warmup": warmup, "plot": plot, "limits": limits or None}
        for name, value in foreign.items():
            if value is not None:
                raise UsageError(
                    f"--{name} is for comparing backends, and --algorithms or --tune compares algorithms: leave one out"
                )
        target = _table(output) if tune else None
        compare_algorithms(collective, ranks, backends, config, nbytes, budget_s or 60.0, target, json_file)
        return
    from oneaccord_lab.commands.bench_backends import Request, compare_backends

    request = Request(
        collective,
        ranks,
        backends,
        config,
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


def _table(output: Path | None) -> Path:
    """Return where the table is to be written."""
    target = output or Path("tuned.toml")
    if output is None and target.exists():
        raise UsageError(
            f"{target} is there already, with rows that may have taken long to measure: name another file, or this one, by "
            "--output"
        )
    return target


def _sizes(text: str) -> list[int]:
    from oneaccord.common.units import parse_bytes

    return sorted({parse_bytes(word.strip()) for word in text.split(",")})
