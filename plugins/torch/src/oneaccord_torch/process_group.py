"""The process group that torch gets."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from oneaccord import Group
from oneaccord_torch.calls import Calls

if TYPE_CHECKING:

    class _Base:  # what is public has complete types without torch as well
        def __init__(self, rank: int, size: int) -> None: ...
else:
    from torch.distributed import ProcessGroup as _Base

__all__ = ["ProcessGroup"]


class ProcessGroup(Calls, _Base):
    """A process group of torch's, over a group of ours, which `shutdown` closes.

    In torch 2.13 Python can make no part of a process group, but only a whole one, so that it serves all devices.

    Parameters
    ----------
    group
        The ranks.
    store
        torch's store, prefixed for this group.
    timeout
        The most time that a call may last, if it names none itself.
    """

    def __init__(self, group: Group, store: Any, timeout: timedelta) -> None:
        _Base.__init__(self, group.rank, group.world_size)
        Calls.__init__(self, group, timeout)
        self._store = store
        self._name = self._desc = ""

    def __repr__(self) -> str:
        return f"<oneaccord_torch.ProcessGroup {self._name!r} over {self.group!r}>"

    # What torch's C++ asks for; it keeps no names for groups that are made in Python

    def getRank(self) -> int:  # noqa: N802
        """Return this rank."""
        return self.group.rank

    def getSize(self) -> int:  # noqa: N802
        """Return how many ranks the group has."""
        return self.group.world_size

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Keep the name by which torch's operators find the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return that name."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Keep a description."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description."""
        return self._desc

    # What torch's Python asks for

    def get_group_store(self) -> Any:
        """Return torch's store, prefixed for this group."""
        return self._store

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> ProcessGroup:
        return self

    supports_splitting = True
    supports_coalescing = supports_tensor_alloc = supports_time_estimate = False
    options = None

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the ranks compare the numbers of their calls anyway."""

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Make a group of some of the ranks, as `oneaccord.Group.subgroup`; only they need call it.

        Parameters
        ----------
        ranks
            Ranks of this group.
        timeout
            The most time that a call of the new group may last; by default that of this one.
        group_name, group_desc
            What torch calls it.
        opts, device_types
            They change nothing.
        """
        timeout = timeout or timedelta(seconds=self._timeout_s)
        group = self.group.subgroup(ranks, timeout_s=timeout.total_seconds())
        if group is None:
            return None
        name = group_name or f"{self._name}:split:{','.join(map(str, group.ranks))}"
        part = ProcessGroup(group, torch.distributed.PrefixStore(f"{name}/", self._store), timeout)
        part.setGroupName(name)
        part.setGroupDesc(group_desc or "undefined")
        return part

    _start_coalescing = Calls.start_coalescing
    _end_coalescing = Calls.end_coalescing
