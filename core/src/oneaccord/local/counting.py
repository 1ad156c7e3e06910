"""How many ranks ``-n auto`` starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from oneaccord.common.processors import processors
from oneaccord.errors import UsageError

__all__ = ["count_ranks"]

_COUNT_GPUS: Final = """\
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
assert code in (0, 100), f"CUDA's driver returned the error {code}"  # 100: there is no device
print(count.value)
"""
_PATIENCE_S: Final = 60.0
"""How long a driver may take to come up."""


def count_ranks(backend: str, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how many ranks this host has room for, and words for why.

    One for each GPU that processes with these variables see, if the backend is ``nccl``; else one for each processor that this process may use.

    Raises
    ------
    UsageError
        There is no GPU, or the driver does not answer.
    """
    if backend != "nccl":
        return processors(), "one for each processor that this process may use"
    advice = "give the number, as in -n 1"
    try:
        # A process of its own: the launcher keeps nothing of the driver's.
        asked = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _COUNT_GPUS],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"-n auto: the driver of the GPUs did not answer within {_PATIENCE_S:g} s; {advice}") from error
    if asked.returncode:
        reason = asked.stderr.strip().rpartition("\n")[2]
        raise UsageError(f"-n auto: the GPUs of this host cannot be counted: {reason}; {advice}")
    found = int(asked.stdout)
    if not found:
        raise UsageError(
            f"-n auto: the backend 'nccl' needs GPUs, and this process sees none; {advice}, or choose another backend"
        )
    return found, "one for each GPU that this process sees"
