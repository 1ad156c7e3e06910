"""What a group does with memory and streams of its own accord: arrays that suit its calls, barriers between GPUs, the communicator."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from oneaccord.arrays.dtypes import check_dtype, named_dtype
from oneaccord.arrays.libraries import present
from oneaccord.arrays.libraries.cupy import CuPyLibrary
from oneaccord.arrays.memory import NOTHING, Array, aligned_empty
from oneaccord.calls.arguments import extents
from oneaccord.calls.devices.actions import barrier
from oneaccord.calls.runner import Calls
from oneaccord.common.checks import safe_str, whole
from oneaccord.common.installing import install_command
from oneaccord.contract.deadline import Deadline
from oneaccord.errors import DTypeError, LayoutError, OutOfMemoryError, PluginError, UnsupportedError, UsageError

__all__ = ["GpuCalls"]

_CUPY = CuPyLibrary()
_CURRENT = -1
_TOKEN = np.dtype(np.uint8)


class GpuCalls(Calls):
    """What a group has for GPUs, beside its calls on arrays, and for memory."""

    def empty(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: npt.DTypeLike = np.float64,
        *,
        device: str | int | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Return an array in memory that the backend reads and writes in place, if it has memory of that kind.

        In the host's memory, the other ranks of this host can read it. Messages from it need no copy on the way. So collectives on large arrays
        are faster; both the input and ``out=`` gain. All calls accept other arrays too. On other backends this is a plain array, aligned to
        64 bytes. No other rank takes part.

        On a GPU, it is an array of CuPy. If the backend moves GPU memory, this is a collective: all ranks call it in the same order, with
        the same shape and dtype, and it waits for them. NCCL registers the memory, as a symmetric window where it has these. Then `all_reduce`,
        and `all_gather`, `reduce_scatter` and `all_to_all` with even counts, use it as it is; the others copy it. If one rank gives
        such an array to one of these calls, all must, at the same place in arrays of the same call of this; a `CollectiveMismatchError` tells
        where they do not. On other backends it is a plain array of CuPy, and no other rank takes part.

        Parameters
        ----------
        shape, dtype
            As for `numpy.empty`.
        device
            ``"cuda"`` for the GPU that the group uses on this rank, or CuPy's current one if the backend moves no GPU memory; ``"cuda:N"`` or ``N``
            for its number. None, the default, and ``"cpu"`` stand for the host's memory.
        timeout_s
            Seconds that the call may last, where it waits for the other ranks.

        Returns
        -------
        ndarray
            C-contiguous, of undefined content. Its memory is given back when no array refers to it any more. Registered memory is given back when no
            rank's arrays do, and all ranks call this again, or the group is closed, whichever comes first; after an abort, when the survivors
            have met again. Memory that a CUDA graph's calls use waits for the end of the group and of the graph. An array may outlive its group.

        Raises
        ------
        SizeMismatchError
            An extent is negative, or no integer.
        DTypeError
            There is no such dtype, or its arrays cannot travel.
        OutOfMemoryError
            There is no memory, or the backend's share is used up. For registered memory, on any rank; alike on all ranks.
        UsageError
            ``device`` is no device.
        LayoutError
            The group uses another GPU on this rank.
        UnsupportedError
            There is no GPU or no CuPy, or a stream is being captured.
        """
        dtype = named_dtype(dtype)
        number = _device(device)
        self._check_open()
        check_dtype(dtype)
        shape = extents(shape)
        if number is not None:
            return self._on_device(shape, dtype, number, timeout_s)
        nbytes = math.prod(shape) * dtype.itemsize
        backend = self._job.backend
        try:
            shared = backend.allocate(nbytes) if backend is not None and nbytes > 0 else None
        except MemoryError as error:
            raise OutOfMemoryError(safe_str(error), rank=self._job.rank) from error
        given: object = shared
        if given is not None and not (isinstance(given, memoryview) and given.nbytes == nbytes and not given.readonly):
            raise PluginError(
                f"allocate({nbytes}) of the backend {self._job.backend_name!r} returned {shared!r}, and neither a writable memoryview of "
                "so many bytes nor None"
            )
        # Not np.ndarray(..., shared): that would hold what the memoryview is of, and not the memoryview.
        memory = aligned_empty(nbytes) if shared is None else np.frombuffer(shared, np.uint8)
        return memory.view(dtype).reshape(shape)

    def _on_device(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, timeout_s: float | None) -> Any:
        devices = self._paths.devices
        channel = devices.channel
        device = _found(device, None if channel is None else channel.device)
        try:
            nothing = _CUPY.empty((0,), dtype, device)
        except (ValueError, TypeError) as error:
            raise DTypeError(
                f"CuPy has no arrays of {dtype}: give a dtype of as many bytes, such as uint{8 * dtype.itemsize}, and view the memory as "
                f"{dtype} in your library"
            ) from error
        if channel is None or 0 in shape:
            return _CUPY.empty(shape, dtype, device).owner

        def add(deadline: Deadline) -> Any:
            stream, _ = nothing.library.stream(device)
            with devices.reporting("empty"):
                if channel.is_capturing(stream):
                    raise UnsupportedError(
                        "memory cannot be registered while a stream is captured: call empty() before the capture begins"
                    )
            return devices.add_memory(dtype, shape, deadline)

        made = self._in_this_thread("empty", devices.turns, add, timeout_s, devices.call_sequence.next)
        return _CUPY.empty(shape, dtype, device).owner if made is None else _CUPY.adopt(made[0], shape, dtype, device, made[1])

    def communicator(self) -> int:
        """Return the address of the communicator that moves this group's GPU memory: an ``ncclComm_t``, for kernels and libraries of one's own.

        It belongs to the group. Do not destroy, finalize, abort, revoke or split it, capture no call on it, and register no memory with it that
        `empty` has made. Calls on it are calls of the group: all ranks make them in the same order as the group's own, and no thread makes
        one while another thread calls the group. oneaccord neither compares them nor knows their deadlines. Call `synchronize` and wait for your own streams before the group
        is closed, because the address is not valid any more from then on, nor after a failure.

        Returns
        -------
        int
            The address.

        Raises
        ------
        UnsupportedError
            The backend moves no GPU memory, or not by a communicator.
        """
        self._check_open()
        channel = self._paths.devices.channel
        address = 0 if channel is None else channel.communicator()
        if not address:
            raise UnsupportedError(
                f"the backend {self._job.backend_name!r} has no communicator of a GPU library for this group of {self._members.size}: take "
                'backend = "nccl" or "hybrid", and more than one rank'
            )
        return address

    def _barrier_on_device(self, device: str | int, timeout_s: float | None) -> None:
        """Let the current streams wait until those of all ranks have come as far."""
        devices = self._paths.devices
        channel = devices.channel
        number = _found(
            _CURRENT if (wanted := _device(device)) is None else wanted, None if channel is None else channel.device
        )
        if channel is None:
            self._check_open()
            for library in present():
                library.synchronize(number)
            self._call(("barrier",), NOTHING, NOTHING, timeout_s)
            return
        token = _CUPY.empty((1,), _TOKEN, number)
        self._in_this_thread("barrier", devices.turns, partial(barrier, devices, token), timeout_s, devices.call_sequence.next)


def _device(device: object) -> int | None:
    """Return the number of a GPU, `_CURRENT` for the group's own; None for the host's memory."""
    if device is None or device == "cpu":
        return None
    if device == "cuda":
        return _CURRENT
    number = None if isinstance(device, bool) else whole(device)
    if isinstance(device, str) and (found := re.fullmatch(r"cuda:(\d{1,4})", device)):
        number = int(found[1])
    if number is None or number < 0:
        raise UsageError(f'device must be "cuda", "cuda:N", the number N of a GPU, "cpu" or None, and {device!r} was given')
    return number


def _found(device: int, used: int | None) -> int:
    """Return the number of the GPU to use, which is ``used`` where the group uses one."""
    try:
        cupy: Any = sys.modules.get("cupy") or import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
        device = (cupy.cuda.runtime.getDevice() if used is None else used) if device == _CURRENT else device
    except ImportError as error:
        raise UnsupportedError(
            f"arrays on GPUs are those of CuPy, which cannot be imported ({error}); try: "
            + install_command("pip install 'oneaccord[nccl]', or 'oneaccord[nccl-cuda13]' for CUDA 13")
        ) from error
    except RuntimeError as error:  # CuPy's errors of the runtime and of the driver
        raise UnsupportedError(f"this process sees no GPU ({error}): look at nvidia-smi and CUDA_VISIBLE_DEVICES") from error
    if device >= count:
        raise UsageError(f"device is {device}, and this process sees {count} GPU{'' if count == 1 else 's'}, counted from 0")
    if used not in (None, device):
        raise LayoutError(
            f'device is {device}, and this rank\'s group uses device {used}: give device="cuda", or set backends.nccl.device'
        )
    return device
