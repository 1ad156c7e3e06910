"""A job as a command of its own: ``oneaccord run`` on each host, for launchers that pass such a command on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oneaccord.contract.launcher import WholeJob
from oneaccord.local.launching import Launch

__all__ = ["whole_job"]

_GRACE_S: Final = 30.0


def whole_job(job: Launch, choices: Mapping[str, str | None], variables: Mapping[str, str]) -> WholeJob:
    """Return a job with the words by which ``oneaccord run`` starts its part on a host.

    Parameters
    ----------
    job
        The job; its numbers of ranks and hosts are left out.
    choices
        Options with a word that are no part of `Launch`; None if one is not given.
    variables
        The variables for it.
    """
    with_words = {
        **choices,
        "grace": job.grace_s,
        "max-restarts": job.max_restarts,
        "min-ranks": job.min_ranks,
        "log-dir": job.log_dir,
    }
    without = {
        "no-prefix": not job.prefix,
        "no-fork": not job.fork,
        "keep-going": job.keep_going,
        "verbose": job.verbose,
        "module": job.is_module,
    }
    words = [f"--{name}={value}" for name, value in with_words.items() if value is not None]
    words += [f"--{name}" for name, is_given in without.items() if is_given]
    return WholeJob(
        (*words, "--", job.target, *job.args),
        dict(variables),
        _GRACE_S if job.grace_s is None else job.grace_s,
        job.keep_going or job.is_elastic,
        job.max_restarts or 0,
    )
