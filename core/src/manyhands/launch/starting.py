"""``manyhands run``, once its words are understood: check the job, find out who starts its ranks, and have them started."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NamedTuple

from manyhands.common.folders import here
from manyhands.common.variables import Variable, of_setting
from manyhands.errors import ConfigError, UsageError
from manyhands.launch.forked import ForkServer, fork_server
from manyhands.launch.groups import all_signals
from manyhands.launch.variables import shared_variables, with_hash_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["RunOptions", "start"]


class RunOptions(NamedTuple):
    """What the command line says; `manyhands.cli.run.run` has the words for people."""

    target: str
    args: tuple[str, ...] = ()
    ranks: int | None = None
    module: bool = False
    backend: str | None = None
    config: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    no_prefix: bool = False
    keep_going: bool = False
    no_fork: bool = False
    verbose: bool = False
    record: str | None = None
    max_restarts: int | None = None
    min_ranks: int | None = None
    max_ranks: int | None = None
    grace_s: float | None = None
    run_id: str | None = None


@all_signals()
def start(options: RunOptions) -> int:
    """Start the ranks, wait for their end, and return the exit code: 130 where Ctrl-C came before there was anybody to hear of it.

    Raises
    ------
    UsageError
        The job cannot be: no such program, numbers that cannot be, options that the backend has no use for.
    ConfigError
        The configuration is wrong, or there is no such file.
    PluginError
        The backend is not installed, is broken, or cannot run here.
    """
    if os.getpid() == 1:  # as in a container; the kernel ends the first process by no signal that has no handler
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _end_by)
    doing = "read the configuration and looked for the backend"
    # It imports what the ranks need while the configuration is read here, and so comes before all that this process imports itself.
    server, environ = None, dict(os.environ)
    # With several hosts the seed is made of the secret, which the configuration may name.
    if options.nnodes == 1 or environ.get(Variable.SECRET):
        environ = with_hash_seed(environ)
        if not options.no_fork:
            server = fork_server(options.target, options.module, shared_variables(options.ranks or 1, environ))
    try:
        run = _prepared(options, environ, server)
        doing = "got ready to start the ranks"
        return run()
    except KeyboardInterrupt:
        sys.stderr.write(f"\nmanyhands run: ended by SIGINT, while it {doing}\n")
        return 128 + signal.SIGINT
    finally:
        if server is not None:
            server.close()


def _end_by(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _prepared(options: RunOptions, environ: dict[str, str], server: ForkServer | None) -> Callable[[], int]:
    """Check all that can be known before a rank is there; return what starts them. Raises as `start`."""
    from pathlib import Path

    config, backend, rendezvous = options.config, options.backend, options.rendezvous
    if config is not None and not Path(config).is_file():
        raise ConfigError(f"--config {config}: there is no such file in {here()}", file="argument", key="config", value=config)
    # Needs pydantic and every plugin that may be chosen, hence a good part of the time until the ranks start.
    from manyhands.config.secret import job_secret
    from manyhands.launch.launching import Launch
    from manyhands.launch.resolve import resolve_launcher

    # A module that `plugins` names may lie beside the program. The ranks find it there first; here, nothing of the program hides what is installed.
    folder = here() if options.module else Path(options.target).resolve().parent
    if folder.is_absolute():
        sys.path.append(str(folder))
    file = None if config is None else str(Path(config).resolve())
    resolution = resolve_launcher(backend, file)
    chosen = {}
    if backend is not None:
        chosen[of_setting("backend")] = backend
    run_id = options.run_id or environ.get(Variable.RUN_ID) or _step_of_slurm(environ, options.nnodes)
    if run_id:
        chosen[Variable.RUN_ID] = run_id
    elif options.nnodes > 1:
        sys.stderr.write(
            "manyhands run: without --run-id, a launcher that is left over from an earlier run with this address and secret could join this one: give the "
            "same new word on each host, such as the number of the scheduler's job\n"
        )
    if file is not None:
        chosen[Variable.CONFIG] = file
    if options.record is not None:
        chosen[of_setting("recorder", "directory")] = str(Path(options.record).absolute())
    meeting = resolution.settings.rendezvous
    if options.nnodes > 1 and rendezvous is None:
        rendezvous = meeting.address
    if secret := job_secret(meeting, environ):
        environ[Variable.SECRET] = os.fsdecode(secret)
    job = Launch(
        options.target,
        options.module,
        options.args,
        1 if options.ranks is None else options.ranks,
        options.nnodes,
        options.node_rank,
        rendezvous,
        chosen,
        not options.no_prefix,
        options.keep_going,
        not options.no_fork,
        options.verbose,
        options.max_restarts,
        options.min_ranks,
        options.max_ranks,
        options.grace_s,
    )
    job.validate(environ)
    if options.ranks is None and options.nnodes == 1:
        _tell_of_options_behind(options)
    if resolution.launcher is None:
        from manyhands.launch.processes import run_job

        return lambda: run_job(job, environ, server, resolution.modules)

    if server is not None:
        server.close()  # nobody asks it for ranks
    from manyhands.contract.backend import LaunchRequest

    if options.nnodes > 1 or rendezvous is not None:
        raise UsageError(
            f"the backend {resolution.backend!r} runs all ranks on this host, and --nnodes or --rendezvous was given; leave them "
            "out, or choose another backend with --backend"
        )
    unknown = [
        name
        for name, is_given in (
            ("--keep-going", options.keep_going),
            ("--max-restarts", options.max_restarts is not None),
            ("--min-ranks", options.min_ranks is not None),
            ("--max-ranks", options.max_ranks is not None),
            ("--grace", options.grace_s is not None),
        )
        if is_given
    ]
    if unknown:
        raise UsageError(
            f"the backend {resolution.backend!r} starts the ranks itself, and knows no {unknown[0]}; leave it out, or choose another backend "
            "with --backend"
        )
    chosen["PYTHONHASHSEED"] = environ["PYTHONHASHSEED"]
    request = LaunchRequest(
        options.target, options.module, job.args, job.ranks, resolution.backend, chosen, job.prefix, resolution.config
    )
    launcher = resolution.launcher
    return lambda: launcher(request)


def _step_of_slurm(environ: Mapping[str, str], nodes: int) -> str:
    """Return the name of the step of Slurm that has started a launcher on each host; nothing where there is none of that size."""
    hosts = environ.get("SLURM_STEP_NUM_NODES", "")
    if nodes == 1 or not (hosts.isdigit() and int(hosts) >= nodes):
        return ""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "slurm " + ".".join(environ[name] for name in names if environ.get(name))


def _tell_of_options_behind(options: RunOptions) -> None:
    """Say that words which look like options of ``run`` are the program's, where one rank runs perhaps because of that."""
    for word, number in zip(options.args, (*options.args[1:], ""), strict=False):
        name, _, value = word.partition("=")
        if name in {"-n", "-np", "--ranks", "--nproc-per-node", "--nproc_per_node"} and (value or number).isdigit():
            sys.stderr.write(
                f"manyhands run: {name} {value or number} stands after {options.target} and is passed on to it, so that one rank runs; "
                f"to run {value or number} ranks: manyhands run -n {value or number} {options.target}\n"
            )
            return
