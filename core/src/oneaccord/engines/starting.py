"""``oneaccord run --on NAME``: what the words of the command mean for a launcher of hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_origin

from oneaccord.common.variables import Variable, of_setting
from oneaccord.contract.launcher import Ask
from oneaccord.engines.commands import whole_job
from oneaccord.engines.hostfile import read_hostfile, read_hosts
from oneaccord.engines.hosts import passed_on, run_on_hosts
from oneaccord.engines.registry import describe_launcher, make_host_launcher, make_job_launcher, options_of
from oneaccord.errors import InvalidWorldSizeError, UsageError
from oneaccord.local.groups import all_signals
from oneaccord.local.launching import Launch
from oneaccord.local.variables import given_variables

__all__ = ["start_on"]


@all_signals()
def start_on(
    job: Launch,
    *,
    on: str,
    hosts: str | None = None,
    hostfile: str | None = None,
    per_host: int | None = None,
    options: Sequence[str] = (),
    backend: str | None = None,
    config: str | None = None,
    record: str | None = None,
    run_id: str | None = None,
    is_auto: bool = False,
    variables: Sequence[str] = (),
) -> int:
    """Start the ranks of a job on the hosts of a launcher, wait for their end, and return the exit code.

    Parameters
    ----------
    job
        What the command line says of the job; its ranks are those of all hosts.
    on
        The name of the launcher.
    hosts, hostfile, per_host, options
        What the options of these names say; None or empty if they are not given.
    backend, config, record, run_id, is_auto, variables
        As for `oneaccord.local.starting.start`.

    Raises
    ------
    UsageError, PluginError
        The launcher is unknown, cannot be used here, or does not take an option; or as for `oneaccord.engines.hosts.run_on_hosts`.
    RendezvousError, DeadlineError
        As for `oneaccord.engines.hosts.run_on_hosts`.
    """
    if is_auto:
        raise UsageError(f"-n auto counts the processors of one host; with --on {on} give the number of ranks of all hosts")
    if job.ranks < 1:
        raise InvalidWorldSizeError(f"-n {job.ranks}: a job has at least one rank; give -n 1 or more")
    job.validate_stdin()
    if per_host is not None and per_host < 1:
        raise UsageError(f"--per-host {per_host}: give 1 or more")
    if job.nodes != 1 or job.node_rank or job.rendezvous is not None:
        raise UsageError(
            f"--nnodes, --node-rank and --rendezvous are for a oneaccord run on each host; with --on {on} leave them out"
        )
    if job.max_ranks is not None:
        raise UsageError(f"--max-ranks {job.max_ranks} with --on {on}: spares are for one host; leave --max-ranks out")
    given = given_variables(variables)
    known = options_of(on).model_fields
    wanted = dict(_option(on, each, known) for each in options)
    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile both name the hosts: give one of them")
    if hosts is not None or hostfile is not None:
        if "hosts" not in known:
            raise UsageError(f"the launcher {on!r} finds the hosts itself: leave --hosts and --hostfile out")
        wanted["hosts"] = read_hosts(hosts) if hosts is not None else read_hostfile(Path(str(hostfile)))
    if describe_launcher(on).kind == "jobs":
        if job.stdin not in (None, "none"):
            raise UsageError(f"--stdin {job.stdin} with --on {on}: its ranks read nothing; leave --stdin out, and read files")
        choices = {"backend": backend, "config": config, "record": record, "run-id": run_id}
        return make_job_launcher(on, wanted).run(Ask(job.ranks, per_host), whole_job(job, choices, {**passed_on(), **given}))
    launcher = make_host_launcher(on, wanted)
    chosen = {
        str(Variable.RUN_ID): run_id,
        of_setting("recorder", "directory"): None if record is None else str(Path(record).absolute()),
    }
    job = replace(job, environ={name: value for name, value in chosen.items() if value is not None})
    where = None if config is None else os.path.abspath(config)  # noqa: PTH100 - a path of the hosts, which may not be here
    return run_on_hosts(launcher, Ask(job.ranks, per_host), job, backend=backend, config=where, variables=given)


def _option(on: str, text: str, known: Any) -> tuple[str, Any]:
    """Return a launcher's option; one that takes several words is divided as a shell does it."""
    import shlex

    name, equals, value = text.partition("=")
    if not equals or name not in known:
        raise UsageError(f"--option {text}: the launcher {on!r} takes KEY=VALUE with one of these keys: {', '.join(known)}")
    return name, shlex.split(value) if get_origin(known[name].annotation) in (tuple, list) else value
