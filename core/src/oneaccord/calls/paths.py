"""Host and device: two paths behind one request. Here is decided which one a step takes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from oneaccord.arrays.costs import Costs
from oneaccord.arrays.libraries import DeviceArray
from oneaccord.calls.devices.actions import check_arrays, collective, copied, message
from oneaccord.calls.devices.calls import Devices
from oneaccord.calls.devices.wide import WideAction
from oneaccord.calls.host.actions import CopyAction, HostPath, TellAction
from oneaccord.calls.host.plans import VECTOR
from oneaccord.calls.messages.actions import MessagePath
from oneaccord.calls.order.call_sequence import CallSequence
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.post.path import PostPath
from oneaccord.calls.request import Later, Local, Message, Operation, SizeExchange
from oneaccord.calls.staged import StagedPath
from oneaccord.common.native import native
from oneaccord.config import Settings
from oneaccord.config.plugins import PluginManager
from oneaccord.config.select import Selector
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.device import DeviceChannel
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["Action", "Fast", "HostFast", "Paths"]


class Action(Protocol):
    """A step that is ready to run: all that can be refused has been, and its memory is there."""

    @property
    def turns(self) -> Sequence[Turns]:
        """Whose turns it must have, in this order."""
        ...

    def run(self, deadline: Deadline) -> Any:
        """Carry it out when its turn has come; return its result."""
        ...


class Fast(Protocol):
    """The fast way of a call that was made before."""

    @property
    def is_stale(self) -> bool:
        """Whether it is of no use any more, so that another one must be made."""
        ...

    def run(self, array: Any, out: Any, timeout_s: float) -> Any:
        """Make the call, and return its result; `SLOW_PATH` if it must take that path."""
        ...

    def later(self, array: Any, out: Any) -> Later | None:
        """Return the call to be made later: its words, its turn, and a function that makes it within a number of seconds; None for the slow path."""
        ...


class HostFast(Fast, Protocol):
    """One that may have a compiled form."""

    def compiled(self, module: ModuleType, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Return its compiled form of the module ``oneaccord_native``, for arrays of a dtype and shape; None if it has none. If C stops, `go_on` does the rest."""
        ...

    def go_on(self, array: Any, target: Any, at: tuple[int, int], timeout_s: float) -> Any:
        """Go on ``at`` the number of a call that has begun and at a step of it; return its result."""
        ...


class Paths:
    """Carries out the steps of one group's calls.

    Parameters
    ----------
    job, members
        The job and the members of the group.
    plugins, selector
        The plugins that may observe and offer native collectives, and the selector of algorithms.
    channel
        The channel that moves the group's device memory; None if the backend moves none.
    settings
        The config.

    Attributes
    ----------
    plugins
        As above.
    native
        The compiled executor; None if there is none.
    call_sequence
        The group's call sequence.
    fast
        The fast ways of calls that were made before, by their keys and by the dtype and shape of the array.
    host, messages, devices
        The ways that steps take.
    post
        Carries out messages with tags.
    staged
        The path of collectives on GPUs through the host's memory; None if the backend moves device memory itself.
    """

    def __init__(
        self,
        job: Job,
        members: Members,
        plugins: PluginManager,
        selector: Selector,
        channel: DeviceChannel | None,
        settings: Settings,
    ) -> None:
        self.plugins: PluginManager = plugins
        self.native: ModuleType | None = native() if settings.native else None
        self.call_sequence: CallSequence = CallSequence(job, members, plugins, self.native)
        self.fast: dict[Hashable, Fast] = {}
        self.host: HostPath = HostPath(job, members, self.call_sequence, plugins, selector)
        self.messages: MessagePath = MessagePath(job, members, self.call_sequence, plugins)
        self.post: PostPath = PostPath(job, members, self.call_sequence, plugins, self.native)
        self.staged: StagedPath | None = None
        if job.backend is not None and "cuda" not in job.backend.memory:
            said = settings.gpu_staging
            costs = Costs(said.latency_s, said.move_bytes_per_s, said.copy_bytes_per_s)
            self.staged = StagedPath(job, members, self.host, costs)
        self.devices: Devices = Devices(
            job, members, plugins, self.call_sequence, channel, self.fast, always=settings.gpu_check == "always"
        )

    def prepare(self, step: Operation | SizeExchange | Message | Local) -> Action:
        """Make a step ready to run.

        Raises
        ------
        DTypeError, LayoutError, SizeMismatchError
            ``out`` does not fit, or an array is on another device than the group's.
        OutOfMemoryError
            There is no memory for the result.
        UsageError
            A function of the user's does not combine arrays.
        """
        match step:
            case Operation(source=DeviceArray()) if self.staged is not None:
                return self.staged.prepare(step)
            case Operation(source=DeviceArray()):
                wide, may_alias = self.devices.wide(step.request), step.request.collective in VECTOR
                if wide is not None:
                    return WideAction(self.devices, step, wide, may_alias=may_alias)
                return collective(self.devices, step, may_alias=may_alias)
            case Operation():
                return self.host.prepare(step)
            case SizeExchange():
                check_arrays(self.devices, *step.arrays)  # before the other ranks learn of the call
                return TellAction(self.host, step)
            case Message(outgoing=DeviceArray()) | Message(target=DeviceArray()):
                return message(self.devices, step)
            case Message():
                return self.messages.prepare(step)
            case Local(source=DeviceArray()):
                return copied(self.devices, step)
            case Local():
                return CopyAction(self.call_sequence, step)

    @property
    def observed(self) -> bool:
        """Whether there are observers, which must see every call."""
        return self.plugins.observed

    def close(self) -> None:
        """Give back the transports; no call may follow."""
        self.devices.close()
        if self.staged is not None:
            self.staged.close()
        self.host.plans.close()
        self.messages.close()
