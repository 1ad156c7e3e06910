"""The group: the ranks that communicate together, and all that a user does with them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from oneaccord.calls.arguments import integer
from oneaccord.calls.devices.opening import open_channel
from oneaccord.calls.failures import exchange_cards
from oneaccord.calls.paths import Paths
from oneaccord.common.aliases import ForeignNames
from oneaccord.common.checks import is_success, whole
from oneaccord.config.select import Selector
from oneaccord.contract.backend import Backend
from oneaccord.contract.cards import write_card
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.device import DeviceChannel
from oneaccord.control.protocol import Report
from oneaccord.errors import CommError, DeadlineError, UsageError
from oneaccord.group.batch import BatchCalls
from oneaccord.group.collectives import CollectiveCalls
from oneaccord.group.forming import Setup
from oneaccord.group.gpus import GpuCalls
from oneaccord.group.messages import MessageCalls
from oneaccord.group.objects import ObjectCalls
from oneaccord.group.shared import SharedCalls
from oneaccord.group.shrinking import check_possible, shrink
from oneaccord.group.windows import WindowCalls
from oneaccord.job.group_ranks import Members, ranks_per_host
from oneaccord.job.job import Job
from oneaccord.job.threads import duration
from oneaccord.runtime.computer import COMPUTER

__all__ = ["Group"]

_GRACE_S = 5.0


class Group(GpuCalls, CollectiveCalls, MessageCalls, ObjectCalls, BatchCalls, SharedCalls, WindowCalls, ForeignNames):
    """The ranks that communicate together. Made by `oneaccord.init`; a context manager that closes the group at its end.

    Every rank must call the same collectives in the same order, with arrays of the same shape and dtype, the same ``op`` and the
    same ``root``. If a rank does not, every rank gets a `CollectiveMismatchError` that names the ranks and their calls.

    An array may be a NumPy array of any numeric dtype, bool, or bfloat16 and float8 of ml_dtypes, or of a structured dtype with
    fields of these. It may be anything that NumPy can read as an array (the buffer protocol, ``__array__``), or a Python
    number. It may be an array of CuPy, torch, JAX and other libraries that speak DLPack or the CUDA array interface: in host
    memory, or on GPUs if the backend moves GPU memory.

    An array that is not C-contiguous is copied first, so that elements never change places. The result is ``out``, which may be
    the input itself, or else a new C-contiguous array of the same library. On GPUs, calls are enqueued on the caller's current
    stream, and return at once.

    All methods except `close` raise these errors, besides those that they list:

    ClosedError
        The group is closed.
    CommError
        The group's first failure, the same on every rank: `PeerLostError`, `DeadlineError`, `CollectiveMismatchError`, `AbortedError` or
        `ProtocolError`. ``out`` is then undefined, and each later call raises the same; `shrink` makes a new group.
    DTypeError, LayoutError, SizeMismatchError, UsageError
        The arguments are wrong. This is found before any byte moves, and the group stays as it was.
    OutOfMemoryError
        There is no memory for the result. The group stays as it was, unless this happened in the middle of the call.

    ``timeout_s`` is the most seconds that a call may last, by default the config's ``timeout_s``.

    Attributes
    ----------
    rank
        This rank, from 0 to ``world_size - 1``.
    world_size
        How many ranks the group has.
    ranks
        The members, as ranks of the world, in the order of their ranks in this group.
    backend_name
        The backend that moves the bytes.
    """

    def __init__(
        self,
        job: Job,
        members: Members,
        setup: Setup,
        selector: Selector,
        channel: DeviceChannel | None,
    ) -> None:
        settings = setup.resolved.settings
        super().__init__(job, members, Paths(job, members, setup.plugins, selector, channel, settings), settings)
        self.rank: int = members.rank
        self.world_size: int = members.size
        self.ranks: tuple[int, ...] = members.ranks
        self.backend_name: str = job.backend_name
        self._setup = setup
        self._selector = selector
        self._closing = threading.Lock()
        self._counting = threading.Lock()
        self._splits = 0
        self._agreements = 0
        self._subgroups: dict[tuple[int, ...], int] = {}
        job.drains.append(self._drain)

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ", failed" if self._job.control.failed else ""
        number = f" {self._members.number}" if self._members.number else ""
        return f"<oneaccord.Group{number} rank {self.rank} of {self.world_size} over {self.backend_name}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or is_success(error):
            self.close()
        elif self._members.number == 0 or not self._job.control.failed:
            self._job.abort(error)
        # Otherwise the ranks know already, and the group of all ranks, which can still shrink, decides the future of the job.

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for calls in flight, for at most ``timeout_s``, and leave the group. Calling it twice is fine.

        Work of compiled functions of JAX in the background comes first, however long it lasts.

        Calls that have not had their turn by then end with `ClosedError`. The group of all ranks also waits, within that time,
        until the other ranks leave, and closes the groups made from it. A group made by `split` or `subgroup` waits for no rank.
        Its resources are given back when all its members have closed it.

        Parameters
        ----------
        timeout_s
            The most seconds that it may last; by default the config's ``timeout_s``.

        Raises
        ------
        CommError
            The job failed, and no call on this rank has raised the error yet. The group is closed all the same.
        """
        try:
            self._settle()
        finally:
            self._leave(timeout_s)

    def _settle(self) -> None:
        """Wait for JAX's work in the background: a compiled function that has been called may still call this group."""
        wait = getattr(sys.modules.get("jax"), "effects_barrier", None)
        if wait is not None and self._job.runtime is COMPUTER and self._call_sequence.is_usable:
            wait()

    def _leave(self, timeout_s: float | None) -> None:
        deadline = self._begin(timeout_s)
        if self._members.number == 0:
            self._job.close(deadline)
            return
        with self._closing:
            if self._is_closed:
                return
            while not self._drain(deadline, for_good=False) and not deadline.passed():
                pass
            # From here on no call begins; those that have begun are waited for in the background.
            self._job.closed_groups.add(self._members.number)
            self._job.drains.remove(self._drain)
            self._when_idle(lambda: self._job.control.leave_group(self._members.number, self.ranks, self._paths.close))

    # After a failure

    def revoke(self) -> None:
        """End all calls on this group, on every rank: those that wait and those to come raise an `AbortedError` that names this rank.

        A rank that leaves a common plan calls it, so that no other one waits for it there. As after any failure, this ends all groups
        of the job, and `shrink` makes a new one, here of the same ranks. If the job has failed already, nothing changes.

        Raises
        ------
        ClosedError
            The group is closed.
        """
        self._begin(None)
        if self._is_closed:
            raise self._job.closed_error()
        self._saw()
        if not self._job.control.failed:
            self._job.fail(
                Report("aborted", f"rank {self._job.rank} revoked the group; shrink() makes a new one", self._job.rank)
            )

    def agree(self, flag: int, *, timeout_s: float | None = None) -> int:
        """Return the bitwise "and" of the flags of all surviving members; the same on all of them, even if a rank dies meanwhile.

        Every surviving member must call it. It also works on a group that has failed, and then shows whether all can continue. The call does
        not wait for a member that has ended; its flag counts if it came before. The store passes the flags on, and its successor knows every result
        that was sent, as in the early returning agreement of Herault et al. (2015). Two threads of a rank must not call it at once.

        Parameters
        ----------
        flag
            A bool, or an integer of 64 bits.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        int
            A bool if ``flag`` is one.

        Raises
        ------
        UsageError
            ``flag`` is no integer of 64 bits.
        PeerLostError
            The store is lost, and so is its successor.
        DeadlineError
            A member that still runs did not come in time. All members that came raise this error, which names it, and may call again.
        """
        is_bool = isinstance(flag, bool | np.bool_)
        number = int(flag) if is_bool else whole(flag)
        if number is None or not -(1 << 63) <= number < 1 << 63:
            raise UsageError(f"flag must be a bool or an integer of 64 bits, not {flag!r}")
        deadline = self._begin(timeout_s)
        if self._is_closed:
            raise self._job.closed_error(operation="agree")
        members = self._members
        name = f"agree #{self._agreements} of {members.name}"
        agreed = self._job.control.recovery.agree(members.channel, name, number, self.ranks, deadline)
        self._agreements += 1
        return bool(agreed) if is_bool else agreed

    def shrink(self, *, timeout_s: float | None = None) -> Group:
        """Make a new group of the survivors, after this one has failed. Every survivor must call it.

        Ranks that died, ended, or closed the group are not waited for. The others are renumbered from 0, in their old order.
        If no rank is lost, for example after a missed deadline, the new group has the same ranks. This group and the groups made
        from it are closed, even if an error is raised. Call it on the group of all ranks.

        Parameters
        ----------
        timeout_s
            The most seconds that it may last; by default the config's ``rendezvous.timeout_s``.

        Returns
        -------
        Group
            Close it, ideally by ``with``. Its errors use its own rank numbers.

        Raises
        ------
        UsageError
            The group has not failed, or was made by `split` or `subgroup`. It stays as it was.
        PeerLostError
            The rank in whose process the ranks would meet is lost, and so is its successor.
        DeadlineError
            A rank that still runs did not call this in time. All ranks that called it raise this error, which names that rank. They may
            call it again, until they close this group.
        UnsupportedError
            The ranks are threads, as in a simulated world. The group stays as it was.
        """
        job, settings = self._job, self._setup.resolved.settings
        deadline = self._begin(settings.rendezvous_timeout_s if timeout_s is None else timeout_s)
        if self._members.number:
            raise UsageError(
                f"shrink() was called on {self._members.name}: call it on the group of all ranks, and divide the new one again"
            )
        with self._closing:
            if not job.may_shrink_again:
                if job.closed:
                    raise job.closed_error(", and cannot shrink")
                if not job.control.failed:
                    raise UsageError(
                        "shrink() is for a group that has failed, but this one has not: continue to use it, or use subgroup()"
                    )
                check_possible(job)
                job.retire()
            job.may_shrink_again = False  # for any other thread
        job.instead = "shrink() has failed, and cannot be tried again: restart the job"
        formed = shrink(job, self._setup, deadline)
        formed.job.on_close += job.on_close
        job.on_close.clear()
        job.instead = "use the group that shrink() returned"
        return Group(*formed)

    @property
    def is_usable(self) -> bool:
        """Whether calls may be made: the group is open, and this rank knows of no failure of its job. It asks no other rank."""
        return self._call_sequence.is_usable

    @property
    def _is_closed(self) -> bool:
        return self._job.closed or self._members.number in self._job.closed_groups

    # Groups of some of the ranks

    def split(self, color: int | None, key: int | None = None, *, timeout_s: float | None = None) -> Group | None:
        """Divide the group into new ones: ranks that give the same color come together. Every rank must call it.

        The new group has its own traffic and its own ranks, from 0 on; it may be used at the same time as this one and any other,
        also from other threads. Errors name ranks of the world: see ``ranks``. Two threads of a rank must not divide one group
        at once, because nothing shows which of their calls belong together.

        Parameters
        ----------
        color
            Which of the new groups this rank joins: any integer of 64 bits; None for none of them.
        key
            Orders the ranks in the new group; ranks with equal keys keep the order of this group. By default all ranks keep it.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        Group or None
            The new group that this rank belongs to; None if ``color`` is None.

        Raises
        ------
        UsageError
            ``color`` or ``key`` is no integer.
        """
        return self._split(color, key, "made by split()", timeout_s)

    def _split(self, color: int | None, key: int | None, made: str, timeout_s: float | None) -> Group | None:
        """Divide the group; ``made`` says in errors how that was done."""
        card = write_card((integer(color, "color"), integer(key, "key") or 0))
        deadline = self._begin(timeout_s)
        self._check_open("split")
        # Counted last: a call that is refused must not change which calls of the ranks belong together.
        with self._counting:
            self._splits = count = self._splits + 1
        name = f"split #{count} of {self._members.name}"
        cards, number = self._meet(name, card, self._members.ranks, deadline)
        wishes = self._job.read_cards(cards, tuple[int | None, int], name, self._members.ranks)
        if color is None:
            return None
        chosen = sorted((order, rank) for rank, (other, order) in enumerate(wishes) if other == color)
        place = sorted({other for other, _ in wishes if other is not None}).index(color)
        return self._child(number + place, tuple(self._members.ranks[rank] for _, rank in chosen), made, deadline)

    def subgroup(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> Group | None:
        """Make a group of these ranks, in this order. All of them must call it; the other ranks may.

        Parameters
        ----------
        ranks
            Ranks of this group, each once, the same list on all of them.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        Group or None
            The new group, as for `split`; None on a rank that is not in it.

        Raises
        ------
        InvalidRankError
            One of them is not in this group.
        UsageError
            A rank occurs twice, the list is empty, or ``ranks`` is no list.
        """
        if not hasattr(ranks, "__iter__"):
            raise UsageError(f"ranks must be a list of ranks of this group, not {ranks!r}")
        chosen = tuple(self._builder.arguments.rank(rank, "a member of ranks") for rank in ranks)
        if not chosen or len(set(chosen)) != len(chosen):
            raise UsageError(f"ranks must name at least one rank, and each only once; {list(ranks)} was given")
        deadline = self._begin(timeout_s)
        self._check_open("subgroup")
        if self._members.rank not in chosen:
            return None
        with self._counting:
            self._subgroups[chosen] = count = self._subgroups.get(chosen, 0) + 1
        name = f"subgroup {list(chosen)} #{count} of {self._members.name}"
        members = tuple(self._members.ranks[rank] for rank in chosen)
        _, number = self._meet(name, b"", members, deadline)
        return self._child(number, members, "made by subgroup()", deadline)

    def _meet(self, name: str, card: bytes, members: tuple[int, ...], deadline: Deadline) -> tuple[list[bytes], int]:
        """Trade cards with the members of a group to be; return them, and a number that no other group has."""
        try:
            return exchange_cards(self._job, self._members, name, card, members, deadline)
        except BaseException:
            self._saw()
            raise

    def _child(self, number: int, ranks: tuple[int, ...], made: str, deadline: Deadline) -> Group:
        hosts = [self._job.hosts[rank] for rank in ranks]
        members = Members(number, ranks, ranks.index(self._job.rank), ranks_per_host(hosts), made)
        try:
            channel = open_channel(self._job, members, deadline)
        except CommError:
            self._saw()
            raise
        return Group(self._job, members, self._setup, self._selector, channel)

    # Calls that concern only this rank

    def compute(self, seconds: float) -> None:
        """Let time pass in a simulated world, as if the program computed for so long.

        Everywhere else it does nothing, because computing takes its own time.

        Parameters
        ----------
        seconds
            Seconds of the simulated clock; a rank that a fault plan slows down takes longer.

        Raises
        ------
        UsageError
            ``seconds`` is no finite number of at least 0.
        """
        seconds = duration(seconds)
        self._job.runtime.enter(self._job.rank)
        self._job.runtime.compute(seconds)

    def mark(self, label: str) -> None:
        """Note in the trace of a simulated world that this rank has come to a point of its program, such as ``"step 7"``.

        Everywhere else it does nothing.

        Parameters
        ----------
        label
            The label of the point in the trace.

        Raises
        ------
        UsageError
            ``label`` is no text.
        """
        if not isinstance(label, str):
            raise UsageError(f"the label of a mark must be a text, not {label!r}")
        self._job.runtime.enter(self._job.rank)
        self._job.runtime.mark(label)

    def synchronize(self, *, timeout_s: float | None = None) -> None:
        """Wait on the host until this rank's GPU has done all calls of this group; return at once if none used a GPU.

        If this returns, the results are sound. If a rank was lost meanwhile, results may be wrong, and this raises the error.

        Parameters
        ----------
        timeout_s
            The most seconds to wait. By default as long as the calls take, which their own deadlines bound.

        Raises
        ------
        DeadlineError
            The time is up; the calls continue.
        """
        devices = self._paths.devices
        # By default as long as the calls take: their own deadlines bound this, and name the rank that did not come.
        longest = _GRACE_S + max([self._timeout_s, *(launched.timeout_s for launched in devices.unfinished())])
        deadline = self._begin(longest if timeout_s is None else timeout_s)
        self._check_open()
        if not devices.synchronize(deadline):
            raise DeadlineError(f"the GPU was not done within {deadline.timeout_s:g} s; it continues", rank=self._job.rank)
        self._check_open()

    def backend(self, name: str | None = None) -> Backend | None:
        """Return the backend that moves the bytes, or one of its parts, if it is composed of others.

        Parameters
        ----------
        name
            The name of the part, such as ``"nccl"``; by default the backend itself.

        Returns
        -------
        Backend or None
            None if there is none, as in a world of one, or if the backend has no part of that name.
        """
        backend = self._job.backend
        return backend if name is None or backend is None or name == self._job.backend_name else backend.part(name)
