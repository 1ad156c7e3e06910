"""The variables that all ranks of a host share."""

from __future__ import annotations

import os
from collections.abc import Mapping

from oneaccord.common.processors import processors
from oneaccord.common.variables import OF_ONE_RANK, Variable

__all__ = ["shared_variables", "with_hash_seed"]


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
