"""``manyhands run``: start the ranks of a job on this host."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

__all__ = ["CONTEXT_SETTINGS", "run"]

CONTEXT_SETTINGS: Final[dict[str, Any]] = {"allow_interspersed_args": False}
"""What the command must be registered with: all that follows the script or module belongs to it, ``--help`` included."""


def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or with -m a module.", show_default=False)],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script, passed on untouched.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", help="How many ranks to start on this host; 1 unless given.", show_default=False),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module by its name, as python -m does.")] = False,
    backend: Annotated[
        str | None, typer.Option(help="The backend, instead of that of the configuration.", show_default=False)
    ] = None,
    config: Annotated[str | None, typer.Option(help="The configuration file.", metavar="FILE", show_default=False)] = None,
    nnodes: Annotated[int, typer.Option(help="How many hosts run the job, each with its own `manyhands run`.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Which of the hosts this is, counted from 0.")] = 0,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            help="Where the ranks meet: an address of host 0 and a free port.", metavar="HOST:PORT", show_default=False
        ),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(
            help="Where each rank writes its last calls when the job fails, at SIGUSR1, and at its end, for `manyhands explain`.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Do not begin each line of output with its rank.")] = False,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Let the other ranks go on when one fails, as programs do that call Group.shrink()."),
    ] = False,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            help="How many ranks that fail are replaced, in all; for programs of manyhands.elastic.", show_default=False
        ),
    ] = None,
    min_ranks: Annotated[
        int | None, typer.Option(help="With how many ranks at least the job goes on after a failure.", show_default=False)
    ] = None,
    max_ranks: Annotated[
        int | None,
        typer.Option(
            help="With how many at most; those beyond -n are started as spares, and come in after a failure.",
            show_default=False,
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            help="How many seconds ranks may take to end after SIGTERM, SIGHUP or Ctrl-C, before they are killed; 30 unless given.",
            metavar="SECONDS",
            show_default=False,
        ),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            help="What tells this run from others with the same address and secret: the same word on each host, and a new one for each run.",
            metavar="WORD",
            show_default=False,
        ),
    ] = None,
    no_fork: Annotated[
        bool, typer.Option("--no-fork", help="Start a Python for each rank, instead of forking one that has imported NumPy.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Say why ranks are not forked, where they cannot be.")
    ] = False,
) -> None:
    """Run a script as several ranks, and end all of them when one fails, unless --keep-going says otherwise.

    Each rank is a process with torchrun's variables. Every line of output begins with its rank. When a rank fails, its traceback is
    shown last, the others are ended, and the exit code is its own. With --keep-going the others are left alone; if all of those end
    well that did not fail first, the exit code is 0, and the last lines say which ranks were lost.

    With --max-restarts, --min-ranks or --max-ranks the others go on as well, and ranks that fail are replaced: new ones come into the job when the
    others call Group.shrink(), as manyhands.elastic does. On several hosts, each launcher replaces those of its own.

    With --backend simulated the ranks live in one process, on a clock of their own: MANYHANDS_BACKENDS__SIMULATED__SEED, ..__NETWORK,
    ..__FAULTS and ..__TRACE, or the table [backends.simulated] of the configuration, say how.

    On several hosts, run the same command on each, with its own --node-rank and the same variable MANYHANDS_SECRET.
    """
    # Imported here, so that `manyhands --help` and the other commands do not pay for it.
    from manyhands.launch.starting import RunOptions, start

    options = RunOptions(
        target,
        tuple(args or ()),
        ranks,
        module,
        backend,
        config,
        nnodes,
        node_rank,
        rendezvous,
        no_prefix,
        keep_going,
        no_fork,
        verbose,
        record,
        max_restarts,
        min_ranks,
        max_ranks,
        grace,
        run_id,
    )
    raise typer.Exit(start(options))
