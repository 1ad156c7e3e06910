"""``oneaccord run`` after its words are understood: check the job, find the launcher of its ranks, and start them."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oneaccord.common.folders import here
from oneaccord.common.variables import Variable, of_setting
from oneaccord.errors import ConfigError, UsageError
from oneaccord.local.forked import ForkServer, fork_server
from oneaccord.local.groups import all_signals
from oneaccord.local.variables import given_variables, shared_variables, with_hash_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from oneaccord.contract.backend import LaunchRequest
    from oneaccord.local.launching import Launch
    from oneaccord.local.resolve import Resolution

__all__ = ["completed_for_host", "start"]


@all_signals()
def start(
    job: Launch,
    backend: str | None = None,
    config: str | None = None,
    record: str | None = None,
    run_id: str | None = None,
    *,
    is_auto: bool = False,
    variables: Sequence[str] = (),
) -> int:
    """Start the ranks, wait for their end, and return the exit code: 130 if Ctrl-C came before there was anybody to hear of it.

    Parameters
    ----------
    job
        What the command line says of the job; what it leaves out comes from the configuration.
    backend, config, record, run_id
        The options of these names, for the ranks; None if one is not given.
    is_auto
        Whether to start as many ranks as this host has room for, in place of the job's number.
    variables
        As for `oneaccord.local.variables.given_variables`. They hold for this process too, as if they were set before the command.

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
    os.environ.update(given_variables(variables))
    doing = "was reading the configuration and looking for the backend"
    # It makes the imports of the ranks while the configuration is read here, and so comes before all imports of this process itself.
    server, environ = None, dict(os.environ)
    # With several hosts the seed is made of the secret, which the configuration may name.
    if job.nodes == 1 or environ.get(Variable.SECRET):
        environ = with_hash_seed(environ)
        if job.fork and not is_auto:  # the ranks' number is part of the variables that they share
            server = fork_server(job.target, job.is_module, shared_variables(job.ranks, environ))
    try:
        if config is not None:
            config = _found(config)
        _find_modules_beside(job)
        # Needs pydantic and every plugin that may be chosen, hence a good part of the time until the ranks start.
        from oneaccord.local.resolve import resolve_launcher

        resolution = resolve_launcher(backend, config)
        if is_auto:
            job = _counted(job, resolution.backend, environ)
        job = _completed(job, resolution, environ, _choices(job, environ, backend, config, record, run_id))
        job.validate(environ)
        run = _starter(job, resolution, environ, server)
        doing = "was getting ready to start the ranks"
        return run()
    except KeyboardInterrupt:
        sys.stderr.write(f"\noneaccord run: ended by SIGINT, while it {doing}\n")
        return 128 + signal.SIGINT
    finally:
        if server is not None:
            server.close()


def completed_for_host(job: Launch, backend: str | None, config: str | None) -> tuple[Launch, tuple[str, ...]]:
    """Return a job of several hosts as it is on this one, and what its ranks are to import, by the configuration that is found here.

    Raises
    ------
    UsageError, ConfigError, PluginError
        As for `start`.
    """
    from oneaccord.local.resolve import resolve_launcher

    if config is not None:
        config = _found(config)
    _find_modules_beside(job)
    resolution = resolve_launcher(backend, config)
    if resolution.launcher is not None:
        raise UsageError(
            f"the backend {resolution.backend!r} starts the ranks itself, on one host; leave --on out, or choose another backend with --backend"
        )
    chosen = {of_setting("backend"): backend, Variable.CONFIG: config}
    return replace(job, environ={**job.environ, **{name: value for name, value in chosen.items() if value}}), resolution.modules


def _end_by(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _found(config: str) -> str:
    """Return where the configuration file lies."""
    if not Path(config).is_file():
        raise ConfigError(f"--config {config}: there is no such file in {here()}", file="argument", key="config", value=config)
    return str(Path(config).resolve())


def _counted(job: Launch, backend: str, environ: Mapping[str, str]) -> Launch:
    """Return the job with as many ranks as this host has room for, and say how many these are."""
    from oneaccord.local.counting import count_ranks

    if job.nodes > 1:
        raise UsageError("-n auto counts for one host, and with --nnodes each must start as many ranks: give the number")
    count, why = count_ranks(backend, environ)
    sys.stderr.write(f"oneaccord run: -n auto: {count} rank{'' if count == 1 else 's'}, {why}\n")
    return replace(job, ranks=count)


def _find_modules_beside(job: Launch) -> None:
    """Let a module that `plugins` names lie beside the program, where the ranks find it first; here it hides nothing that is installed."""
    folder = here() if job.is_module else Path(job.target).resolve().parent
    if folder.is_absolute():
        sys.path.append(str(folder))


def _choices(
    job: Launch, environ: Mapping[str, str], backend: str | None, config: str | None, record: str | None, run_id: str | None
) -> dict[str, str]:
    """Return the variables by which the options reach the ranks."""
    run_id = run_id or environ.get(Variable.RUN_ID) or _step_of_slurm(environ, job.nodes)
    if not run_id and job.nodes > 1:
        sys.stderr.write(
            "oneaccord run: without --run-id, a launcher left over from an earlier run with this address and secret could join this one: give the "
            "same new name on each host, such as the number of the scheduler's job\n"
        )
    chosen = {
        of_setting("backend"): backend,
        Variable.RUN_ID: run_id or None,
        Variable.CONFIG: config,
        of_setting("recorder", "directory"): None if record is None else str(Path(record).absolute()),
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _completed(job: Launch, resolution: Resolution, environ: dict[str, str], chosen: dict[str, str]) -> Launch:
    """Return the job with what the configuration says of its rendezvous; its secret is put into ``environ``."""
    from oneaccord.config.secret import job_secret

    meeting = resolution.settings.rendezvous
    if secret := job_secret(meeting, environ):
        environ[Variable.SECRET] = os.fsdecode(secret)
    address = meeting.address if job.nodes > 1 and job.rendezvous is None else job.rendezvous
    return replace(job, rendezvous=address, environ=chosen)


def _starter(job: Launch, resolution: Resolution, environ: Mapping[str, str], server: ForkServer | None) -> Callable[[], int]:
    """Return what starts the ranks: the launcher of processes, or that of the backend."""
    if resolution.launcher is None:
        from oneaccord.local.processes import run_job

        return partial(run_job, job, environ, server, resolution.modules)
    if server is not None:
        server.close()  # nobody asks it for ranks
    return partial(resolution.launcher, _request(job, resolution, environ))


def _request(job: Launch, resolution: Resolution, environ: Mapping[str, str]) -> LaunchRequest:
    """Return what a backend that starts the ranks itself needs to know; refuse options that are for processes."""
    from oneaccord.contract.backend import LaunchRequest

    if job.nodes > 1 or job.rendezvous is not None:
        raise UsageError(
            f"the backend {resolution.backend!r} runs all ranks on this host, so --nnodes and --rendezvous have no use; leave them "
            "out, or choose another backend with --backend"
        )
    of_processes = {
        "--keep-going": job.keep_going or None,
        "--max-restarts": job.max_restarts,
        "--min-ranks": job.min_ranks,
        "--max-ranks": job.max_ranks,
        "--grace": job.grace_s,
        "--stdin": job.stdin,
        "--log-dir": job.log_dir,
    }
    for option, value in of_processes.items():
        if value is not None:
            raise UsageError(
                f"the backend {resolution.backend!r} starts the ranks itself, and has no option {option}; leave it out, or choose another "
                "backend with --backend"
            )
    chosen = {**job.environ, "PYTHONHASHSEED": environ["PYTHONHASHSEED"]}
    return LaunchRequest(
        job.target, job.is_module, job.args, job.ranks, resolution.backend, chosen, job.prefix, resolution.config
    )


def _step_of_slurm(environ: Mapping[str, str], nodes: int) -> str:
    """Return the name of the step of Slurm that has started a launcher on each host; nothing if there is none of that size."""
    hosts = environ.get("SLURM_STEP_NUM_NODES", "")
    if nodes == 1 or not (hosts.isdigit() and int(hosts) >= nodes):
        return ""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "slurm " + ".".join(environ[name] for name in names if environ.get(name))
