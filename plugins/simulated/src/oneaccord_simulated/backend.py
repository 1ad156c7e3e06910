"""Messages between simulated ranks: matched in order, carried by the simulated network, copied once at most.

A message that is longer than ``eager_bytes`` leaves when its receive is there, and ends for both at once when it arrives. This reveals a program
that relies on the network to keep unreceived messages. A shorter one leaves when it is sent, and its sender continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

from oneaccord.api import (
    POST_CHANNEL,
    Backend,
    BackendUnavailableError,
    Bootstrap,
    Damaged,
    Deadline,
    HeaderMismatch,
    LinkLost,
    Mailbox,
    Record,
    Sink,
    Transfer,
    Transport,
)
from oneaccord_simulated.flight import Line
from oneaccord_simulated.plugin import SimulatedConfig
from oneaccord_simulated.task import Task
from oneaccord_simulated.world import SHARED, SimulatedRuntime

__all__ = ["SimulatedBackend", "SimulatedTransport"]

_SLOT_BYTES = 4096
"""The longest payload of a mailbox: a rank of a large world has many."""
_SETTLE_S = 0.01
"""The virtual time for which a rank that received an unexpected message waits before it says so: meanwhile the other ranks reach the point
where the error stops them, and can say where they are."""


class _End(Transfer):
    """One end of a message: the sender's or the receiver's.

    Attributes
    ----------
    peer, is_send
        The peer, and which end this is.
    header, payload
        The message to send; or the expected header and the memory for the payload. Empty if a sink takes it.
    sink
        The function that takes it instead of memory.
    failure
        Its fault.
    mismatch
        Its future fault, unless another one is found first.
    waiter
        The task that waits for it.
    call
        The call of the program that it belongs to, if that is one between two ranks.
    """

    __slots__ = ("call", "failure", "header", "is_send", "mismatch", "nbytes", "payload", "peer", "sink", "waiter")

    def __init__(
        self, peer: int, header: bytes, payload: memoryview, nbytes: int, *, is_send: bool, sink: Sink | None = None
    ) -> None:
        self.done: bool = False
        self.moved: int = 0
        self.peer: int = peer
        self.is_send: bool = is_send
        self.header: bytes = header
        self.payload: memoryview = payload
        self.nbytes: int = nbytes
        self.sink: Sink | None = sink
        self.failure: BaseException | None = None
        self.mismatch: HeaderMismatch | None = None
        self.waiter: Task | None = None
        self.call: Record | None = None


class _Message:
    """A message on its way; `receive` is the other end, once there is one."""

    __slots__ = ("clock", "damage", "end", "has_arrived", "number", "receive")

    def __init__(self, end: _End, number: int, clock: list[int] | None) -> None:
        self.clock = clock
        self.damage: Damaged | None = None
        self.end = end
        self.number = number
        self.receive: _End | None = None
        self.has_arrived = False


class _Pipe:
    """The messages of one channel from one rank to another.

    Parameters
    ----------
    runtime, mismatches
        The world of the ranks, and the list of unexpected messages.
    line
        The sender and the receiver.
    eager_bytes
        How long a message may be to leave when it is sent.
    is_direct
        Whether the calls of both ranks are `send`, `recv` and the like.
    is_ordering
        Whether who receives a message knows all that came before it was sent.

    Attributes
    ----------
    met
        The calls of sender and receiver in which a message met its receive last, if they are such calls.
    """

    __slots__ = ("_awaited", "_eager_bytes", "_is_direct", "_is_ordering", "_line", "_mismatches", "_runtime", "_sent", "met")

    def __init__(
        self,
        runtime: SimulatedRuntime,
        mismatches: _Mismatches,
        line: Line,
        eager_bytes: int,
        *,
        is_direct: bool,
        is_ordering: bool,
    ) -> None:
        self._runtime = runtime
        self._is_direct = is_direct
        self._is_ordering = is_ordering
        self.met: tuple[Record, Record] | None = None
        self._mismatches = mismatches
        self._line = line
        self._eager_bytes = eager_bytes
        self._sent: deque[_Message] = deque()
        self._awaited: deque[_End] = deque()

    def send(self, end: _End) -> None:
        self._note_call(end)
        # Core knows which of the messages with tags the program receives, and when.
        clock = self._runtime.history.snapshot(self._line.source) if self._is_ordering else None
        message = _Message(end, self._runtime.faults.count_message(self._line), clock)
        if end.nbytes <= self._eager_bytes:
            # The sender continues, and may write to its memory.
            message.end = _End(end.peer, bytes(end.header), memoryview(bytes(end.payload)), end.nbytes, is_send=True)
            message.end.call = end.call
            self._finish(end)
            self._depart(message)
        if self._awaited:
            self._meet(message, self._awaited.popleft())
        else:
            self._sent.append(message)

    def receive(self, end: _End) -> None:
        self._note_call(end)
        if self._sent:
            self._meet(self._sent.popleft(), end)
        else:
            self._awaited.append(end)

    def _meet(self, message: _Message, receive: _End) -> None:
        sent = message.end
        if sent.call is not None and receive.call is not None:
            self.met = sent.call, receive.call
        if sent.header != receive.header or sent.nbytes != receive.nbytes:
            self._mismatches.add(self._line.dest, receive, HeaderMismatch(receive.peer, bytes(sent.header)))
            return
        message.receive = receive
        if message.damage is not None:
            self._fail(receive, message.damage)
        elif message.has_arrived:
            self._deliver(message)
        elif sent.nbytes > self._eager_bytes:
            self._depart(message)

    def unreceived(self) -> list[Record]:
        """Return the calls between two ranks whose messages have not been received."""
        return [message.end.call for message in self._sent if message.end.call is not None]

    def _note_call(self, end: _End) -> None:
        if self._is_direct:
            end.call = self._runtime.scheduler.current().doing

    def _depart(self, message: _Message) -> None:
        if self._runtime.faults.drops(self._line, message.number):
            self._runtime.faults.lose(self._line, message.end.nbytes, lambda: self._notice(message, "was lost on its way"))
        else:
            self._runtime.flights.depart(self._line, message.end.nbytes, lambda: self._arrive(message))

    def _arrive(self, message: _Message) -> None:
        message.has_arrived = True
        if message.receive is not None:
            self._deliver(message)

    def _deliver(self, message: _Message) -> None:
        sent, receive = message.end, message.receive
        assert receive is not None
        payload = sent.payload
        bit = self._runtime.faults.corrupts(self._line, message.number, sent.nbytes)
        if bit is not None:
            self._notice(message, f"came with another checksum than it left with: bit {bit} had changed on its way")
            return
        try:
            if receive.sink is None:
                receive.payload[:] = payload
            elif sent.nbytes:
                receive.sink(payload.toreadonly(), 0)
        except BaseException as error:  # noqa: BLE001 - an exception of a reduction belongs to the receiver
            self._fail(receive, error)
            return
        self._runtime.history.learn(self._line.dest, message.clock)
        self._finish(sent)
        self._finish(receive)

    def _notice(self, message: _Message, what: str) -> None:
        """Let both ends learn that a message did not come as it was sent."""
        line = self._line
        words = f"message {message.number} from rank {line.source} to rank {line.dest}, of {message.end.nbytes} bytes, {what}"
        message.damage = Damaged(line.source, words)
        if message.receive is not None:
            self._fail(message.receive, message.damage)
        if not message.end.done:
            self._fail(message.end, Damaged(line.dest, words))

    def _finish(self, end: _End) -> None:
        end.done = True
        end.moved = end.nbytes + 1
        if end.waiter is not None:
            self._runtime.scheduler.wake(end.waiter)

    def _fail(self, end: _End, failure: BaseException) -> None:
        end.failure = failure
        if end.waiter is not None:
            self._runtime.scheduler.wake(end.waiter)


class _Mismatches:
    """The receives of all ranks that met another message than they expected, and have not said so yet."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime = runtime
        self._found: list[tuple[int, _End]] = []

    def add(self, rank: int, receive: _End, mismatch: HeaderMismatch) -> None:
        """Take note of one."""
        receive.mismatch = mismatch
        if not self._found:
            self._runtime.scheduler.at(self._runtime.now() + _SETTLE_S, self._tell)
        self._found.append((rank, receive))

    def _tell(self) -> None:
        """Let one rank raise the error, which will stop the others: the lowest one that can, whatever came first."""
        found, self._found = sorted(self._found, key=lambda each: (each[0], each[1].peer)), []
        for _, receive in found:
            receive.failure = receive.mismatch
        waiting = [(rank, receive.waiter) for rank, receive in found if receive.waiter is not None]
        able = [(rank, task) for rank, task in waiting if not self._runtime.scheduler.stands(rank)]
        for _, task in able[:1] or waiting:
            self._runtime.scheduler.wake(task)


class _Pipes:
    """The connections between one backend of each rank.

    Parameters
    ----------
    runtime
        The world of the ranks.
    """

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime = runtime
        self._mismatches = _Mismatches(runtime)
        self._pipes: dict[tuple[int, int, int], _Pipe] = {}

    def pipe(self, channel: int, source: int, dest: int, eager_bytes: int) -> _Pipe:
        """Return the pipe of one direction between two ranks."""
        key = (channel, source, dest)
        pipe = self._pipes.get(key)
        if pipe is None:
            line = Line(source, dest, channel // 2)
            pipe = self._pipes[key] = _Pipe(
                self._runtime,
                self._mismatches,
                line,
                eager_bytes,
                is_direct=channel % 2 == 1,
                is_ordering=channel != POST_CHANNEL,
            )
        return pipe

    def met(self, channel: int, source: int) -> list[tuple[int, Record, Record]]:
        """Return the ranks to which a rank has sent directly, and the last calls on both sides that did so."""
        found = [(dest, pipe.met) for (at, rank, dest), pipe in self._pipes.items() if (at, rank) == (channel, source)]
        return [(dest, *met) for dest, met in sorted(found, key=lambda each: each[0]) if met is not None]

    def unreceived(self, source: int) -> list[Record]:
        """Return the calls by which a rank sent messages directly that have not been received, in order."""
        pipes = [pipe for (_, rank, _), pipe in self._pipes.items() if rank == source]
        calls = [call for pipe in pipes for call in pipe.unreceived()]
        return sorted(dict.fromkeys(calls), key=lambda call: (call.channel, call.sequence))

    def forget(self, channel: int, dest: int) -> None:
        """Forget the pipes to a rank of a channel that no rank uses any more."""
        for key in [key for key in self._pipes if key[0] == channel and key[2] == dest]:
            del self._pipes[key]


class SimulatedBackend(Backend):
    """Pipes to the other ranks.

    Parameters
    ----------
    bootstrap
        This rank.

    Raises
    ------
    BackendUnavailableError
        The ranks do not live in a simulated world.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        runtime = None if bootstrap.shared is None else bootstrap.shared.get(SHARED)
        if runtime is None:
            raise BackendUnavailableError(
                "the ranks of the simulated backend run in one process: start them with `oneaccord run --backend simulated` or "
                "oneaccord_simulated.run(), or choose another backend for ranks that are processes"
            )
        self.runtime: SimulatedRuntime = cast("SimulatedRuntime", runtime)
        self.rank: int = bootstrap.rank
        self.eager_bytes: int = cast("SimulatedConfig", bootstrap.config).eager_bytes
        # A world may make several groups, one after the other; each has pipes of its own.
        number = self.runtime.next_backend(self.rank)
        self._pipes: _Pipes = self.runtime.pipes.setdefault(number, _Pipes(self.runtime))
        self._waiting: set[Task] = set()
        self.ended: str = ""

    def open_transport(self, channel: int) -> SimulatedTransport:
        """Return the transport of a channel."""
        return SimulatedTransport(self, channel)

    def pipe(self, channel: int, source: int, dest: int) -> _Pipe:
        """Return the pipe of one direction between two ranks."""
        return self._pipes.pipe(channel, source, dest, self.eager_bytes)

    def close_channel(self, channel: int) -> None:
        """Forget the pipes to this rank of a channel that no rank uses any more."""
        self._pipes.forget(channel, self.rank)

    def wait(self, ends: Sequence[_End], deadline: Deadline) -> None:
        """As `Transport.wait`."""
        scheduler = self.runtime.scheduler
        task = scheduler.current()
        while not self.check(ends):
            for end in ends:
                end.waiter = task
            task.awaits = tuple((end.peer, end.is_send) for end in ends)
            self._waiting.add(task)
            try:
                woken = scheduler.block(deadline.at)
            finally:
                self._waiting.discard(task)
                task.awaits = ()
                for end in ends:
                    end.waiter = None
            if not woken:
                raise next((end.mismatch for end in ends if end.mismatch is not None), TimeoutError("the deadline passed"))

    def check(self, ends: Sequence[_End]) -> bool:
        """Return whether one is done; raise what has failed."""
        for end in ends:
            if end.failure is not None:
                raise end.failure
        if any(end.done for end in ends):
            return True
        if self.ended:
            raise LinkLost(ends[0].peer, self.ended)
        return False

    def abort(self) -> None:
        """Wake every thread that waits."""
        self._end("the job was aborted")

    def close(self) -> None:
        """End every transport."""
        self._end("the backend was closed")

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason
        for task in sorted(self._waiting, key=lambda task: task.number):
            self.runtime.scheduler.wake(task)


class SimulatedTransport(Transport):
    """Messages of one channel; of any length, and whole."""

    streams = True

    def __init__(self, backend: SimulatedBackend, channel: int) -> None:
        self._backend = backend
        self._channel = channel
        self.eager_bytes: int = backend.eager_bytes
        self._waits: Task | None = None
        self._is_interrupted = False
        self._outgoing: dict[int, _Pipe] = {}
        self._incoming: dict[int, _Pipe] = {}

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Nothing to do: pipes are made when used."""

    def close(self) -> None:
        """Forget this channel."""
        self._backend.close_channel(self._channel)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send."""
        end = _End(peer, header, payload, len(payload), is_send=True)
        self.outgoing(peer).send(end)
        return end

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive."""
        end = _End(peer, header, payload, len(payload), is_send=False)
        self.incoming(peer).receive(end)
        return _checked(end)

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        """Start to receive, and let ``sink`` read the payload in the sender's memory."""
        end = _End(peer, header, memoryview(b""), nbytes, is_send=False, sink=sink)
        self.incoming(peer).receive(end)
        return _checked(end)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Wait until a message has come, or gone."""
        if self._is_interrupted:
            self._is_interrupted = False
            raise TimeoutError("the wait was interrupted")
        self._waits = self._backend.runtime.scheduler.current()
        try:
            self._backend.wait(cast("Sequence[_End]", transfers), deadline)
        finally:
            self._waits, self._is_interrupted = None, False

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """See whether something has failed: messages move by themselves."""
        self._backend.check(cast("Sequence[_End]", transfers))

    def interrupt(self) -> bool:
        """Wake the task that waits."""
        self._is_interrupted = True
        if self._waits is not None:
            self._backend.runtime.scheduler.wake(self._waits, woken=False)
        return True

    def mailbox(self, peer: int) -> Mailbox:
        """Return the mailbox of a peer."""
        return _SimulatedMailbox(self, peer)

    def outgoing(self, peer: int) -> _Pipe:
        """Return the pipe to a peer."""
        pipe = self._outgoing.get(peer)
        if pipe is None:
            pipe = self._outgoing[peer] = self._backend.pipe(self._channel, self._backend.rank, peer)
        return pipe

    def incoming(self, peer: int) -> _Pipe:
        """Return the pipe from a peer."""
        pipe = self._incoming.get(peer)
        if pipe is None:
            pipe = self._incoming[peer] = self._backend.pipe(self._channel, peer, self._backend.rank)
        return pipe


class _SimulatedMailbox(Mailbox):
    """Short messages to and from one peer."""

    __slots__ = ("_peer", "_transport")

    def __init__(self, transport: SimulatedTransport, peer: int) -> None:
        self._transport = transport
        self._peer = peer
        self.outgoing = (memoryview(bytearray(_SLOT_BYTES)),)
        self.incoming = (memoryview(bytearray(_SLOT_BYTES)),)
        self.next_out = self.next_in = 0

    def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Send the message in the slot."""
        end = _End(self._peer, bytes(header), self.outgoing[0][:nbytes], nbytes, is_send=True)
        self._transport.outgoing(self._peer).send(end)
        return None if end.done else end

    def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Receive into the slot."""
        end = _End(self._peer, bytes(header), self.incoming[0][:nbytes], nbytes, is_send=False)
        self._transport.incoming(self._peer).receive(end)
        return None if _checked(end).done else end


def _checked(end: _End) -> _End:
    """Raise the fault of a message that met its receive at once."""
    if end.failure is not None:
        raise end.failure
    return end
