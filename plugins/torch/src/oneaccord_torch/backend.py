"""The part of a process group that torch 2.14 and newer get, beside which other devices may have others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from oneaccord import Group
from oneaccord_torch.calls import Calls
from oneaccord_torch.work import Handle

if TYPE_CHECKING:

    class _Base:  # what is public has complete types without torch as well
        def __init__(self, rank: int, size: int) -> None: ...
else:
    from torch._C._distributed_c10d import Backend as _Base

__all__ = ["Backend"]


class Backend(Calls, _Base):
    """What serves the tensors of some devices in a process group of torch's, over a group of ours, which `shutdown` closes.

    torch 2.13 can make none in Python; see `oneaccord_torch.process_group.ProcessGroup`.

    Parameters
    ----------
    group
        The ranks.
    timeout
        The most time that a call may last, if it names none itself.
    """

    supports_splitting: bool = True
    supports_coalescing: bool = True

    def __init__(self, group: Group, timeout: timedelta) -> None:
        _Base.__init__(self, group.rank, group.world_size)
        Calls.__init__(self, group, timeout)

    def __repr__(self) -> str:
        return f"<oneaccord_torch.Backend over {self.group!r}>"

    @property
    def options(self) -> Any:
        """Return what torch asks for before it splits a group: the name of the backend, and its timeout."""
        base: Any = _Base
        return base.Options(self.getBackendName(), timedelta(seconds=self._timeout_s))

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Backend | None:
        """Make one for a group of some of the ranks, as `oneaccord.Group.subgroup`; only they need call it."""
        timeout: timedelta = self.options._timeout if opts is None else opts._timeout
        group = self.group.subgroup(ranks, timeout_s=timeout.total_seconds())
        return None if group is None else Backend(group, timeout)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has come here; the error names all ranks that have not, with ``wait_all_ranks`` or without."""
        Calls.monitored_barrier(self, None if opts is None else opts.timeout)

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Handle:
        """Combine sparse tensors of all ranks in place."""
        return self.allreduce(tensors, opts)
