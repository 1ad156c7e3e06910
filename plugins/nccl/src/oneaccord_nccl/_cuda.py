"""CUDA: devices and streams by the runtime, which CuPy brings, and all that may wait for a device by the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from oneaccord.api import BackendUnavailableError, DeviceFailure, install_command
from oneaccord_nccl import _driver
from oneaccord_nccl.plugin import INSTALL

__all__ = ["Cuda", "Description", "load"]


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
        Where it is plugged in; the instances of one GPU (MIG) share that.
    uuid
        What no other device has, and no other instance of a GPU; as hexadecimal digits.
    gpu
        The same of the whole GPU, if the device is an instance of one.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    bus_id: str
    uuid: str
    gpu: str


class Cuda:
    """CUDA, as this process has it.

    What it refuses is raised as `DeviceFailure`.

    Parameters
    ----------
    runtime
        The module ``cupy.cuda.runtime``.
    driver
        The driver.

    Attributes
    ----------
    runtime, driver
        As above.
    error
        What the runtime raises.
    """

    def __init__(self, runtime: Any, driver: _driver.Driver) -> None:
        self.runtime = runtime
        self.driver: _driver.Driver = driver
        self.error: type[Exception] = runtime.CUDARuntimeError

    def count(self) -> int:
        """Return the number of devices that this process sees."""
        try:
            return int(self.runtime.getDeviceCount())
        except self.error as error:
            raise DeviceFailure(f"CUDA: {error}") from error

    def describe(self, device: int) -> Description:
        """Return what there is to say of a device."""
        try:
            found = self.runtime.getDeviceProperties(device)
        except self.error as error:
            raise DeviceFailure(f"CUDA: {error}") from error
        uuid, gpu = self.driver.identity(device)
        return Description(
            name=found["name"].decode(errors="replace"),
            memory=found["totalGlobalMem"],
            capability=(found["major"], found["minor"]),
            bus_id=f"{found['pciDomainID']:04x}:{found['pciBusID']:02x}:{found['pciDeviceID']:02x}",
            uuid=uuid,
            gpu=gpu,
        )

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device the current one of this thread, and give the other one back at the end.

        Not by its number: a thread that has used no device yet has the first one, and to set that one would fill its memory with a context.
        """
        context, before = self.driver.context(device), self.driver.current()
        if context == before:
            yield
            return
        self.driver.make_current(context)
        try:
            yield
        finally:
            with contextlib.suppress(DeviceFailure):  # of a device that has failed, which is told elsewhere
                self.driver.make_current(before)

    def new_stream(self) -> int:
        """Return a stream of the current device that does not wait for the default stream, nor that for it."""
        try:
            return int(self.runtime.streamCreateWithFlags(self.runtime.streamNonBlocking))
        except self.error as error:
            raise DeviceFailure(f"CUDA: {error}") from error


def load() -> Cuda:
    """Return CUDA.

    Raises
    ------
    BackendUnavailableError
        There is none, in words.
    """
    try:
        cuda = import_module("cupy.cuda")
    except ImportError as error:
        raise BackendUnavailableError(f"CuPy cannot be imported ({error}): {install_command(INSTALL)}") from error
    return Cuda(cuda.runtime, _driver.load())
