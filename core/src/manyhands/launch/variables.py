"""The variables that all ranks of a host share."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["shared_variables"]

_MISLEADING = (
    # An outer launcher's or the shell's own say about ranks; it would win over, or contradict, what this launcher sets.
    "MANYHANDS_RANK",
    "MANYHANDS_WORLD_SIZE",
    "MANYHANDS_RENDEZVOUS",
    "MANYHANDS_RENDEZVOUS_FD",
    "MANYHANDS_ELASTIC",
    "MANYHANDS_NEWCOMER",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def shared_variables(ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return those variables of a rank that are the same for all, and that something may read while a Python begins.

    Parameters
    ----------
    ranks
        How many ranks this host starts.
    environ
        The variables that they inherit.
    """
    variables = {name: value for name, value in environ.items() if name not in _MISLEADING}
    return variables | _threads_per_rank(max(1, ranks), variables)


def _threads_per_rank(ranks: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what gives each rank its share of the processors, where nobody has said how many threads it may have.

    Else the libraries below NumPy begin one for each processor in each rank, which costs time at the start and gains nothing after it.
    """
    if any(name in variables for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")):
        return {}
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, processors // ranks))}
