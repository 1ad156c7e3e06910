"""``manyhands run``: start the ranks of a job on this host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from manyhands.errors import ConfigError, UsageError

__all__ = ["CONTEXT_SETTINGS", "run"]

CONTEXT_SETTINGS: Final[dict[str, Any]] = {"allow_interspersed_args": False}
"""What the command must be registered with: all that follows the script or module belongs to it, ``--help`` included."""


def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or with -m a module.", show_default=False)],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script, passed on untouched.")
    ] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="How many ranks to start on this host.")] = 1,
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
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Do not begin each line of output with its rank.")] = False,
) -> None:
    """Run a script as several ranks, and end all of them when one fails.

    Each rank is a process with torchrun's variables. Every line of output begins with its rank. When a rank fails, its traceback is
    shown last, the others are ended, and the exit code is its own.

    On several hosts, run the same command on each, with its own --node-rank and the same variable MANYHANDS_SECRET.
    """
    # Imported here, so that `manyhands --help` and the other commands do not pay for it.
    from manyhands.launch.launching import Launch
    from manyhands.launch.resolve import resolve_launcher

    if config is not None and not Path(config).is_file():
        raise ConfigError(
            f"--config {config}: there is no such file in {Path.cwd()}", file="argument", key="config", value=config
        )
    file = None if config is None else str(Path(config).resolve())
    resolution = resolve_launcher(backend, file)
    environ = dict(os.environ)
    chosen = {}
    if backend is not None:
        chosen["MANYHANDS_BACKEND"] = backend
    if file is not None:
        chosen["MANYHANDS_CONFIG"] = file
    meeting = resolution.settings.rendezvous
    if nnodes > 1 and rendezvous is None:
        rendezvous = meeting.address
    if meeting.secret_file is not None and not environ.get("MANYHANDS_SECRET"):
        environ["MANYHANDS_SECRET"] = _secret_of(meeting.secret_file)
    job = Launch(target, module, tuple(args or ()), ranks, nnodes, node_rank, rendezvous, chosen, not no_prefix)
    job.validate(environ)
    if resolution.launcher is None:
        from manyhands.launch.processes import run_job

        raise typer.Exit(run_job(job, environ))

    from manyhands.backend import LaunchRequest

    if nnodes > 1 or rendezvous is not None:
        raise UsageError(
            f"the backend {resolution.backend!r} runs all ranks on this host, and --nnodes or --rendezvous was given; leave them "
            "out, or choose another backend with --backend"
        )
    request = LaunchRequest(target, module, job.args, ranks, resolution.backend, chosen, job.prefix)
    raise typer.Exit(resolution.launcher(request))


def _secret_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"rendezvous.secret_file: {path} cannot be read: {error}", key="rendezvous.secret_file", value=str(path)
        ) from None
