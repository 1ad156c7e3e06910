"""The seam to the CUDA runtime, which CuPy brings: devices, streams and events."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from manyhands.api import BackendUnavailableError, DeviceFailure, install_command
from manyhands_nccl.plugin import INSTALL

__all__ = ["Cuda", "Description", "load", "relax_capture"]

_NOT_READY = 600  # cudaErrorNotReady
_CAPTURE = range(900, 909)  # cudaErrorStreamCapture...
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@dataclass(frozen=True, slots=True)
class Description:
    """What tells one device from another.

    Attributes
    ----------
    name
        What NVIDIA calls it.
    memory
        How many bytes it has.
    capability
        Its compute capability.
    bus_id
        Where it is plugged in; the parts of one GPU (MIG) share that.
    uuid
        What no other device has, and no other part of one; as hexadecimal digits.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    bus_id: str
    uuid: str


class Cuda:
    """The CUDA runtime of this process.

    What the runtime refuses is raised as `DeviceFailure`.

    Parameters
    ----------
    runtime, driver
        The modules ``cupy.cuda.runtime`` and ``cupy.cuda.driver``.

    Attributes
    ----------
    runtime
        That module.
    error
        What it raises.
    """

    def __init__(self, runtime: Any, driver: Any) -> None:
        self.runtime = runtime
        self._driver = driver
        self.error: type[Exception] = runtime.CUDARuntimeError

    def failure(self, error: Exception) -> DeviceFailure:
        """Return what to raise for an error of the runtime."""
        return DeviceFailure(f"CUDA: {error}", is_passing=getattr(error, "status", 0) in _CAPTURE)

    def count(self) -> int:
        """Return the number of devices that this process sees."""
        try:
            return int(self.runtime.getDeviceCount())
        except self.error as error:
            raise self.failure(error) from error

    def describe(self, device: int) -> Description:
        """Return what there is to say of a device."""
        try:
            found = self.runtime.getDeviceProperties(device)
        except self.error as error:
            raise self.failure(error) from error
        return Description(
            name=found["name"].decode(errors="replace"),
            memory=found["totalGlobalMem"],
            capability=(found["major"], found["minor"]),
            bus_id=f"{found['pciDomainID']:04x}:{found['pciBusID']:02x}:{found['pciDeviceID']:02x}",
            uuid=found.get("uuid", b"").hex(),
        )

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device the current one of this thread, and give the other one back at the end.

        Not by its number: a thread that has used no device yet has the first one, and to set that one would fill its memory with a context.
        """
        context: int | None = None
        try:
            if self.runtime.getDevice() != device:
                context = self._context()
                self.runtime.setDevice(device)
            yield
        except self.error as error:
            raise self.failure(error) from error
        finally:
            if context is not None:
                with contextlib.suppress(self._driver.CUDADriverError):  # of a device that has failed, which is told elsewhere
                    self._driver.ctxSetCurrent(context)

    def _context(self) -> int:
        try:
            return int(self._driver.ctxGetCurrent())
        except self._driver.CUDADriverError:  # nobody has used the driver yet
            return 0

    def new_stream(self) -> int:
        """Return a stream of the current device that does not wait for the default stream, nor that for it."""
        return int(self.runtime.streamCreateWithFlags(self.runtime.streamNonBlocking))

    def new_event(self) -> int:
        """Return an event of the current device that takes no times, which would cost."""
        return int(self.runtime.eventCreateWithFlags(self.runtime.eventDisableTiming))

    def is_past(self, event: int) -> bool:
        """Tell whether all that an event stands for is done."""
        status = self.runtime.eventQuery(event)
        if status in {0, _NOT_READY}:
            return bool(status == 0)
        raise self.failure(self.error(status))


def relax_capture() -> None:
    """Let what the calling thread does neither be forbidden by captures of other threads nor spoil them.

    The runtime's binding lacks the function, the driver has it; without it, threads that look at events spoil captures in CUDA's global mode,
    which is torch's.
    """
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def load() -> Cuda:
    """Return the CUDA runtime.

    Raises
    ------
    BackendUnavailableError
        There is none, in words.
    """
    try:
        cuda = import_module("cupy.cuda")
    except ImportError as error:
        raise BackendUnavailableError(f"CuPy cannot be imported ({error}): {install_command(INSTALL)}") from error
    return Cuda(cuda.runtime, cuda.driver)
