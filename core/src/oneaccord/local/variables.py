"""The variables that all ranks of a host share, and those that the command line adds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from oneaccord.common.processors import processors
from oneaccord.common.variables import OF_ONE_RANK, Variable
from oneaccord.errors import UsageError

__all__ = ["given_variables", "shared_variables", "with_hash_seed"]

_OF_TORCHRUN: Final = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    }
)
"""The variables of torchrun that each rank gets."""


def given_variables(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that the options ``--env NAME`` and ``--env NAME=VALUE`` mean.

    Parameters
    ----------
    words
        What stands behind each ``--env``.

    Raises
    ------
    UsageError
        It is no name of a variable, or of one that is not set here, or the launcher itself sets the variable.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or "\0" in word:
            raise UsageError(f"--env {word!r}: write NAME=VALUE, or the NAME of a variable that is set here")
        if name == Variable.SECRET:
            raise UsageError(
                f"--env {name}: every process of this host can read a command line, and each job has a secret of its own; leave it out"
            )
        if name in OF_ONE_RANK | _OF_TORCHRUN:
            raise UsageError(f"--env {name}: the launcher sets this variable for each rank; leave it out")
        if not equals and name not in os.environ:
            raise UsageError(f"--env {name}: the variable is not set here; set it, or write --env {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def shared_variables(ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return those variables of a rank that are the same for all, and that something may read while a Python begins.

    Parameters
    ----------
    ranks
        How many ranks this host starts.
    environ
        The variables that they inherit.
    """
    variables = {name: value for name, value in environ.items() if name not in OF_ONE_RANK}
    return variables | _threads_per_rank(max(1, ranks), variables)


def with_hash_seed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with one seed of hashes for all ranks, so that sets of texts have one order on all of them.

    Hosts of one job have the same seed, since it comes from the job's secret if there is one. ``PYTHONHASHSEED`` that is set already stays.
    """
    if environ.get("PYTHONHASHSEED"):
        return dict(environ)
    secret = environ.get(Variable.SECRET)
    if secret:
        import hashlib  # needed only with a secret

        drawn = hashlib.blake2b(os.fsencode(secret), digest_size=4, person=b"oneaccord hash").digest()
    else:
        drawn = os.urandom(4)
    # 0 would switch Python's protection against chosen keys off.
    return {**environ, "PYTHONHASHSEED": str(int.from_bytes(drawn, "little") or 1)}


def _threads_per_rank(ranks: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give each rank its share of the processors, unless the number of threads is set.

    Else the libraries below NumPy begin one for each processor in each rank, which costs time at the start and gains nothing after it.
    """
    if any(name in variables for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, processors() // ranks))}
