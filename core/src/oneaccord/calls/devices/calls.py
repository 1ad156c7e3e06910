"""The calls of a group on the memory of GPUs: agreed by all ranks before the first of a kind, and enqueued without waiting from then on.

A launch returns at once, and a kernel that waits for a rank that made another call would spin for ever. So no rank launches a kind of call
that it has not made before until the store has brought together what all ranks are about to launch. Kinds that are known by then cost
nothing further: what has been launched is summed up in a digest, which the store compares every `_CHECKED` calls and at the end, and a
call that does not finish on the device is told to the store as any other that waits (`watch`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from oneaccord.arrays.dtypes import dtype_code, dtype_name
from oneaccord.calls.devices.fast import CachedDeviceCall
from oneaccord.calls.devices.kinds import DEVICE, Prepared, device_call, said_call
from oneaccord.calls.devices.registered import Owner, Place, Registered, said_place
from oneaccord.calls.devices.watch import DeviceWatch, Followed, Launched
from oneaccord.calls.failures import exchange_cards
from oneaccord.calls.observed import observed
from oneaccord.calls.order.call_sequence import CallSequence
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.request import Operation, Request
from oneaccord.config.plugins import PluginManager
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.device import DeviceChannel, DeviceEvent, DeviceFailure
from oneaccord.contract.header import CallSignature
from oneaccord.control.protocol import Report
from oneaccord.errors import OneAccordError, UnsupportedError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

if TYPE_CHECKING:
    import numpy as np

    from oneaccord.arrays.libraries import DeviceArray, Library

__all__ = ["Devices"]

_MAX_KINDS = 512
_CHECKED = 64
"""After how many calls the ranks compare what they have called."""
_SUMS = frozenset({"sum", "mean"})
_NAP_S = 0.00005
_now, _new = time.monotonic, tuple.__new__


class Devices:
    """The calls of one group on devices; the caller has a turn of the group's collectives.

    Parameters
    ----------
    job, members
        The job of the group, and its members.
    plugins
        The observers.
    call_sequence
        The group's call sequence, in which these calls are counted among its collectives.
    channel
        What performs them; None if the backend moves no device memory.
    fast
        Where the fast ways of calls are kept.
    always
        Whether the ranks agree on every call before it is launched, and not on the first of each kind alone.

    Attributes
    ----------
    call_sequence
        As above.
    channel
        As above, until it is closed.
    entered
        What is being launched, or was launched last.
    latest
        What was launched last on each stream.
    ended
        Of that, what the device is known to be done with.
    registered
        The group's memory that the channel knows.
    """

    def __init__(
        self,
        job: Job,
        members: Members,
        plugins: PluginManager,
        call_sequence: CallSequence,
        channel: DeviceChannel | None,
        fast: dict[Hashable, Any],
        *,
        always: bool,
    ) -> None:
        self._job = job
        self._members = members
        self._plugins = plugins
        self.call_sequence: CallSequence = call_sequence
        self._always = always
        self.channel: DeviceChannel | None = channel
        self._fast = fast
        self._library = "" if channel is None else channel.library
        self._accumulate = None if channel is None else channel.accumulate
        self._captured: list[DeviceArray] = []
        self._watch: DeviceWatch | None = None if channel is None else DeviceWatch.of(job)
        if self._watch is not None:
            self._watch.add(self)
        self._batched: list[Launched] | None = None
        self.registered: Registered = Registered(job, members, channel)
        self._kinds: dict[Hashable, Prepared] = {}
        self._traded: dict[Request, Prepared] = {}
        self.entered: Launched | None = None
        self.latest: dict[int, Launched] = {}
        self.ended: dict[int, Launched] = {}
        self._copies: dict[int, DeviceEvent] = {}
        self._number = members.channel
        self._digest = 0
        self._count = 0
        self._is_unchecked = False
        self._flows: dict[tuple[int, int], _Flow] = {}

    def ready(
        self, call: Request, deadline: Deadline, *, is_agreed: bool = False, ahead: int = 0, place: Place | None = None
    ) -> Prepared:
        """Return a collective that may be launched now, since all ranks have agreed on it.

        Parameters
        ----------
        call
            What to do.
        deadline
            The deadline of the agreement, if the ranks have to agree.
        is_agreed
            Whether the ranks have just told each other what they are about to do: each may have a part of its own in it, so that what is known
            to one may be new to another.
        ahead
            How many calls are to be launched before this one.
        place
            The place of its memory, if that is registered.

        Raises
        ------
        CommError
            The first cause, alike on all ranks; the group is revoked.
        UnsupportedError
            The backend does not do that, on any rank.
        """
        name = call.name
        self.call_sequence.check(name, self.call_sequence.next + ahead)
        prepared = self._traded.get(call) if is_agreed else self._kinds.get(_kind(call, place))
        if prepared is None and is_agreed:
            prepared = self._prepare(call, call.signature(device=DEVICE))
            _remember(self._traded, call, prepared)
        elif prepared is None or (self._always and not is_agreed):
            prepared = self._agree(call, deadline, ahead, place)
        return prepared

    def ready_messages(
        self, outgoing: tuple[DeviceArray, int] | None, incoming: tuple[DeviceArray, int] | None, deadline: Deadline
    ) -> tuple[Prepared, int]:
        """Return a send, a receive, or both at once, that may be launched now, and the address to launch it with.

        Parameters
        ----------
        outgoing, incoming
            A C-contiguous array and the rank of the group that it goes to, or comes from.
        deadline
            The deadline of the agreement, if the ranks have to agree.

        Raises
        ------
        CommError, UnsupportedError
            As `ready`.
        """
        name = "send" if incoming is None else "recv" if outgoing is None else "sendrecv"
        self.call_sequence.check(name)
        rank = self._members.rank
        flows = [(rank, outgoing[1], outgoing[0])] if outgoing is not None else []
        flows += [(incoming[1], rank, incoming[0])] if incoming is not None else []
        # Each rank says all that it is about to do before it waits for what others say: who sends first and then receives meets it.
        meetings = [self._announce(a, b, array) for a, b, array in flows]
        chosen = [
            (self._message(a, b, array, meeting, deadline), array.pointer)
            for (a, b, array), meeting in zip(flows, meetings, strict=True)
        ]
        if len(chosen) == 1:
            return chosen[0]
        channel, first = self.channel, chosen[0][0]
        assert channel is not None

        def launch(_source: int, _target: int, stream: int) -> None:
            with channel.together():
                for each, pointer in chosen:
                    each.launch(pointer, pointer, stream)

        return Prepared(first.signature, launch, 0, first.nbytes), 0

    def launch(
        self,
        prepared: Prepared,
        source: int,
        target: int,
        stream: int,
        keep: Any,
        timeout_s: float,
        *,
        is_collective: bool = True,
    ) -> None:
        """Enqueue a call that all ranks have agreed on.

        That is all that every call costs, beside `CachedDeviceCall` and the launch itself.

        Parameters
        ----------
        prepared
            The call.
        source, target
            Addresses of C-contiguous memory of this rank's device; 0 if it holds none.
        stream
            The handle of the stream; never that of `PER_THREAD`.
        keep
            What keeps the stream alive.
        timeout_s
            For how many seconds it may last on the device.
        is_collective
            Whether it counts among the group's collectives.

        Raises
        ------
        CommError
            The first cause, alike on all ranks; the group is revoked.
        """
        signature, started = prepared.signature, _now()
        sequence, count = -1, 0
        if is_collective:
            sequence = self.call_sequence.number()
            self._digest = hash((self._digest, prepared.number))
            self._count = count = self._count + 1
        launched = _new(Launched, (stream, keep, signature, sequence, started, timeout_s))  # half the time of Launched(...)
        self.entered = launched
        try:
            if self._plugins.observed:
                self._launch_observed(prepared, source, target, stream, sequence)
            else:
                prepared.launch(source, target, stream)
        except OneAccordError:
            raise
        except (DeviceFailure, TimeoutError) as failure:
            self._failed(failure, said_call(signature, sequence), sequence)
        self.call_sequence.note(sequence, signature, started)
        if self._batched is not None:
            self._batched.append(launched)  # the device gets it at the end of the batch
        else:
            self.latest[stream] = launched
            self._is_unchecked = True
            watch = self._watch
            if watch is not None and watch.is_idle:
                watch.wake()
        if count and not count % _CHECKED:
            self._forget()
            self.checkpoint()

    def _forget(self) -> None:
        """Forget streams whose work has ended, if they are many; no thread launches meanwhile."""
        if len(self.latest) > _CHECKED:
            self.latest = {launched.stream: launched for launched in self.unfinished()}
            self.ended = {}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Launch the calls of a block as one, at its end."""
        channel = self.channel
        if channel is None:
            yield
            return
        self._batched = []
        try:
            with channel.together():
                yield
        finally:
            batched, self._batched = self._batched, None
        self.latest.update((launched.stream, launched) for launched in batched)
        if batched and self._watch is not None:
            self._is_unchecked = True
            self._forget()
            self._watch.wake()

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Tell all ranks of a failure of the library in a block, and raise the first cause."""
        try:
            yield
        except OneAccordError:
            raise
        except (DeviceFailure, TimeoutError) as failure:
            self._failed(failure, what)

    def knows(self, call: Request, place: Place | None = None) -> bool:
        """Return whether the ranks have agreed on a collective before."""
        return not self._always and _kind(call, place) in self._kinds

    def knows_messages(self, outgoing: tuple[DeviceArray, int] | None, incoming: tuple[DeviceArray, int] | None) -> bool:
        """Return whether the ranks concerned have agreed on such messages before."""
        rank, flows = self._members.rank, []
        if outgoing is not None:
            flows.append(((rank, outgoing[1]), outgoing[0]))
        if incoming is not None:
            flows.append(((incoming[1], rank), incoming[0]))
        known = [place in self._flows and (array.dtype, array.size) in self._flows[place].kinds for place, array in flows]
        return not self._always and all(known)

    def wide(self, call: Request) -> np.dtype[Any] | None:
        """Return the dtype in which a reduction is computed; None for that of its arrays."""
        wide, reduction = self._accumulate, call.reduction
        if wide is None or reduction is None or reduction.name not in _SUMS:
            return None
        is_narrow = "float" in call.dtype.name and call.dtype.itemsize < wide.itemsize
        return wide if is_narrow else None

    def keep(self, arrays: Sequence[DeviceArray]) -> None:
        """Keep memory that a graph uses that no other object holds. CUDA does not report the end of a graph, so it is kept until the group is closed."""
        self._captured.extend(arrays)

    def copied(self, stream: int, end: DeviceEvent) -> None:
        """Take note of where the last copy of a result ends on a stream: the call after it may be on another one, and not behind it."""
        self._copies[stream] = end

    def synchronize(self, deadline: Deadline) -> bool:
        """Wait on the host until the device has done all that was launched; return whether it has."""
        channel, copies = self.channel, dict(self._copies)
        if channel is None:
            return True
        try:
            # What is captured runs when the graph does.
            launches = [launched for launched in self.unfinished() if not channel.is_capturing(launched.stream)]
            ends = [*copies.values(), *(channel.record(launched.stream) for launched in launches)]
            while not all(end.done() for end in ends):
                if self._job.control.failed:
                    return True
                if deadline.passed():
                    return False
                time.sleep(_NAP_S)
        except DeviceFailure as failure:
            if not failure.is_passing:
                self.report(failure, "waiting for the GPU")
            return True
        self.ended.update((launched.stream, launched) for launched in launches)
        self._copies = {stream: end for stream, end in self._copies.items() if copies.get(stream) is not end}
        return True

    def unfinished(self) -> list[Launched]:
        """Return what was launched last on each stream, if the device may not be done with it."""
        return [launched for stream, launched in list(self.latest.items()) if self.ended.get(stream) is not launched]

    def finish(self, deadline: Deadline) -> bool:
        """Wait until all is done, and compare once more what the ranks have called; return whether nothing was left to wait for."""
        if not self._is_unchecked or self._job.control.failed:
            return True
        if self.synchronize(deadline):
            self._is_unchecked = False
            self.checkpoint()
            for (source, dest), flow in self._flows.items():
                self._compare_messages(source, dest, flow)
        return False

    def checkpoint(self) -> None:
        """Let the store compare what this rank has called with what the others have."""
        if self._count and not self._job.control.failed:
            place = f"calls of {self._members.name}"
            self._job.control.checkpoint(place, self._count, _as_bytes(self._digest), self._members.ranks)

    def _compare_messages(self, source: int, dest: int, flow: _Flow) -> None:
        """Let the store compare the messages from one rank to another, as both of them know them."""
        if not self._job.control.failed:
            ranks = self._members.ranks
            place = f"messages from rank {ranks[source]} to rank {ranks[dest]} of {self._members.name}"
            self._job.control.checkpoint(place, flow.count, _as_bytes(flow.digest), [ranks[source], ranks[dest]])

    def follow(self, followed: Followed) -> None:
        """Look after something until the device is done with it."""
        assert self._watch is not None
        self._watch.follow(followed)

    def remember(self, place: Hashable, step: Operation, library: Library, *, in_place: bool) -> None:
        """Let the next call of a step's kind, which was just made, go the fast way."""
        call, known = step.request, self._fast.get(place)
        prepared = self._kinds.get(call)
        if known is not None and (known.is_whole or prepared is None):
            return
        if self._always or step.shape is None or not library.is_stream_ordered or step.is_agreed:
            return
        if self.wide(step.request) is not None:
            return
        assert self.channel is not None
        nbytes = device_call(call, self._members.rank).elements * call.dtype.itemsize
        ways = self.call_sequence, self.registered, self._kinds, self.launch
        self._fast[place] = CachedDeviceCall(ways, self.channel.device, call, library, step.shape, nbytes, in_place=in_place)
        # It is forgotten with its kind. Calls on registered memory alone have another kind each, of which the last one was just made.
        anchor = prepared or self._kinds[next(reversed(self._kinds))]
        anchor.places.append(place)

    def add_memory(self, dtype: np.dtype[Any], shape: tuple[int, ...], deadline: Deadline) -> tuple[int, Owner] | None:
        """Register new memory for an array, which all ranks do together, and which counts as a collective; raises as `Registered.add`."""
        count = math.prod(shape)
        signature = CallSignature("empty", dtype_code(dtype), shape, count=count, device=DEVICE)
        started, sequence = _now(), self.call_sequence.next
        with self.reporting(said_call(signature, sequence)):
            try:
                made = self.registered.add(count * dtype.itemsize, signature, sequence, _as_bytes(self._digest), deadline)
            finally:
                self.call_sequence.note(self.call_sequence.number(), signature, started)
        return made

    @property
    def turns(self) -> tuple[Turns, ...]:
        """Whose turn a collective needs."""
        return (self.call_sequence,)

    @property
    def members(self) -> Members:
        """The ranks of the group."""
        return self._members

    def close(self) -> None:
        """Give back the channel; no call may follow."""
        watch, channel, self.channel = self._watch, self.channel, None
        self._captured = []
        if watch is not None and channel is not None:
            watch.forget(self)
            self._job.close_channel(channel, watch.wait_for_look)

    # The first of a kind

    def _agree(self, call: Request, deadline: Deadline, ahead: int, place: Place | None) -> Prepared:
        signature, ranks, sequence = call.signature(device=_where(place)), self._members.ranks, self.call_sequence.next + ahead
        # With what was called before, so that whatever is launched from here on follows from the same calls on all ranks.
        card = signature.digest + _as_bytes(self._digest)
        name = f"{signature.operation} #{sequence} of {self._members.name} on GPUs"
        cards, _ = exchange_cards(self._job, self._members, name, card, ranks, deadline, (signature, sequence))
        other = next((rank for rank, theirs in zip(ranks, cards, strict=True) if theirs != card), None)
        if other is not None:
            text = (
                f"the ranks did not make the same call on their GPUs at #{sequence}, and none was launched: every rank must make the same calls "
                "in the same order, with the same shape, dtype, op and root:"
            )
            report = Report("mismatch", text, other, signature.operation, self._members.channel, sequence, list(ranks))
            raise self._job.fail(report)
        prepared = self._kinds.get(_kind(call, place)) or self._prepare(call, signature)
        while len(self._kinds) >= _MAX_KINDS:
            oldest = self._kinds.pop(next(iter(self._kinds)))
            for key in oldest.places:  # what is not known any more must be agreed on by all ranks, or by none
                self._fast.pop(key, None)
        self._kinds[_kind(call, place)] = prepared
        return prepared

    def _prepare(self, call: Request, signature: CallSignature) -> Prepared:
        assert self.channel is not None
        kind, wide = device_call(call, self._members.rank), self.wide(call)
        launch = self.channel.prepare(kind if wide is None else replace(kind, dtype=wide))
        number = int.from_bytes(signature.digest, "little")
        return Prepared(signature, launch, number, kind.elements * call.dtype.itemsize)

    def _announce(self, source: int, dest: int, array: DeviceArray) -> tuple[str, bytes] | None:
        """Count a message; say what it is where the two ranks have to agree on it, and return the meeting's name and this rank's card."""
        flow = self._flows.setdefault((source, dest), _Flow())
        flow.count += 1
        if (array.dtype, array.size) in flow.kinds and not self._always:
            return None
        ranks = self._members.ranks
        name = f"message #{flow.count} from rank {ranks[source]} to rank {ranks[dest]} of {self._members.name} on GPUs"
        card = f"{array.dtype}[{array.size}]".encode()
        self._job.control.give_card(name, card, [ranks[source], ranks[dest]])
        return name, card

    def _message(
        self, source: int, dest: int, array: DeviceArray, meeting: tuple[str, bytes] | None, deadline: Deadline
    ) -> Prepared:
        """Return what sends or receives one message."""
        flow, key = self._flows[source, dest], (array.dtype, array.size)
        members = (self._members.ranks[source], self._members.ranks[dest])
        if meeting is not None:
            name, card = meeting
            cards, _ = exchange_cards(self._job, self._members, name, card, members, deadline, is_given=True)
            if cards[0] != cards[1]:
                text = (
                    f"{name}: rank {members[0]} sends {cards[0].decode(errors='replace')}, and rank {members[1]} receives {cards[1].decode(errors='replace')}: give an array of "
                    "the same dtype and number of elements to out="
                )
                raise self._job.fail(Report("mismatch", text, members[0], "send", members=list(members)))
        prepared = flow.kinds.get(key)
        if prepared is None:
            channel = self.channel
            assert channel is not None
            make = channel.prepare_send if source == self._members.rank else channel.prepare_recv
            peer = dest if source == self._members.rank else source
            signature = CallSignature("send", dtype_code(array.dtype), (array.size,), count=array.size, device=DEVICE)
            number = int.from_bytes(signature.digest, "little")
            prepared = Prepared(signature, make(array.dtype, array.size, peer), number, array.nbytes)
            _remember(flow.kinds, key, prepared)
        flow.digest = hash((flow.digest, prepared.number))
        if not flow.count % _CHECKED:
            self._forget()
            self._compare_messages(source, dest, flow)
        return prepared

    # What goes wrong

    def _failed(self, failure: DeviceFailure | TimeoutError, what: str, sequence: int = -1) -> NoReturn:
        raise self.report(failure, what, sequence) from failure

    def report(self, failure: DeviceFailure | TimeoutError, what: str, sequence: int = -1) -> OneAccordError:
        """Tell all ranks that the library failed, and return the first cause that they agree on; where nothing is broken, what tells so."""
        job = self._job
        members, name, place = list(self._members.ranks), what.partition(" #")[0], sequence if sequence >= 0 else None
        if isinstance(failure, TimeoutError):
            report = Report("deadline", f"{what}: {failure}", None, name, self._members.channel, place, members)
        elif failure.is_passing:
            return UnsupportedError(f"{what} is not possible while a stream is captured: {failure.reason}")
        elif failure.is_remote:
            text = f"rank {job.rank} lost the connection to another rank's GPU in {what}: {failure.reason}"
            report = Report("lost", text, None, members=members)
        else:
            text = f"rank {job.rank} lost its GPU in {what}: {failure.reason}"
            report = Report("aborted", text, job.rank, members=members)
        return job.control.ended(job.fail(report), name, place)

    def _launch_observed(self, prepared: Prepared, source: int, target: int, stream: int, sequence: int) -> None:
        """Launch, and tell observers when the launch, not the work on the device, begins and ends."""
        signature = prepared.signature
        with observed(
            self._plugins,
            self._job.runtime,
            self._members,
            operation=signature.operation,
            sequence=sequence,
            algorithm=self._library,
            nbytes=prepared.nbytes,
            dtype=dtype_name(signature.dtype),
        ):
            try:
                prepared.launch(source, target, stream)
            except (DeviceFailure, TimeoutError) as failure:
                self._failed(failure, said_call(signature, sequence), sequence)


class _Flow:
    """What has been sent from one rank to another: how many messages, and of which kinds. Both ranks know the same, whatever else they do."""

    __slots__ = ("count", "digest", "kinds")

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self.kinds: dict[Hashable, Prepared] = {}


def _kind(call: Request, place: Place | None) -> Hashable:
    return call if place is None else (call, place)


def _where(place: Place | None) -> str:
    """Return where the memory of a call lies, in words that all ranks must have alike."""
    return DEVICE if place is None else f"{DEVICE} ({said_place(place)})"


def _as_bytes(digest: int) -> bytes:
    return (digest & (1 << 64) - 1).to_bytes(8, "little")


def _remember(known: dict[Any, Any], key: Hashable, value: object) -> None:
    """Keep a value, and as many before it as there is room for: alike on all ranks that remember the same in the same order."""
    while len(known) >= _MAX_KINDS:
        del known[next(iter(known))]
    known[key] = value
