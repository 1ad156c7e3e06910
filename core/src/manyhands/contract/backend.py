"""What a backend is: the abstract classes that a plugin implements, and the description that it registers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import socket

    import numpy as np
    import numpy.typing as npt

    from manyhands.contract.deadline import Deadline
    from manyhands.contract.device import DeviceChannel, DeviceMeeting
    from manyhands.contract.runtime import Runtime
    from manyhands.schedule.steps import Collective

__all__ = [
    "API_VERSION",
    "HEADER_BYTES",
    "Backend",
    "BackendConfig",
    "BackendSpec",
    "Bootstrap",
    "CollectiveRequest",
    "Damaged",
    "HeaderMismatch",
    "LaunchRequest",
    "LinkLost",
    "Mailbox",
    "NativeCollective",
    "Sink",
    "Transfer",
    "Transport",
]

API_VERSION: int = 1
"""The version of the contract between core and plugins; a plugin built for another one is refused."""

HEADER_BYTES: int = 64
"""The size of the header in front of every message; its content is core's business."""


Sink = Callable[[memoryview, int], None]
"""A function that takes the parts of a message: ``sink(data, offset)``."""


class LinkLost(ConnectionError):
    """The connection to ``peer`` broke. A transport raises it; core finds out why and raises the typed error."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"the connection to rank {peer} broke: {reason}")
        self.peer: int = peer
        self.reason: str = reason


class HeaderMismatch(Exception):
    """A message came from ``peer`` with another ``header`` than expected. A transport raises it; core explains it."""

    def __init__(self, peer: int, header: bytes) -> None:
        super().__init__(f"an unexpected message from rank {peer}")
        self.peer: int = peer
        self.header: bytes = header


class Damaged(Exception):
    """A message from `peer` was damaged or lost. A transport that notices it raises this; no call gets the bytes."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer: int = peer
        self.reason: str = reason


class Transfer(ABC):
    """One message on its way.

    Attributes
    ----------
    done
        True once a send's memory may be reused, or a receive's memory is filled.
    moved
        How many bytes have moved so far. This tells a slow message from one that stands still.
    """

    __slots__ = ("done", "moved")

    done: bool
    moved: int


class Mailbox(ABC):
    """Short messages to and from one peer, in memory that the transport owns. No object is made, and nothing is looked up.

    The messages are the same as those of `Transport.send` and `Transport.recv`, in one common order. So a rank may use either
    way, whatever its peer does. At most one thread at a time posts to a mailbox, and at most one fetches from it.

    Core writes a payload into ``outgoing[next_out]`` and posts it; it fetches a payload and reads it in ``incoming[next_in]``, where it
    stays unchanged until the next fetch or receive from this peer.

    Attributes
    ----------
    outgoing, incoming
        One or more slots, each a memoryview of bytes for one payload. All have one length, that of the longest payload.
    next_out
        The slot to fill next. It may be filled unless a transfer that `post` returned is not done yet.
    next_in
        The slot with the payload that was fetched last.
    """

    __slots__ = ("incoming", "next_in", "next_out", "outgoing")

    outgoing: tuple[memoryview, ...]
    incoming: tuple[memoryview, ...]
    next_out: int
    next_in: int

    @abstractmethod
    def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Send the first ``nbytes`` bytes of slot ``next_out``; do not block. ``header`` is copied.

        Returns
        -------
        Transfer or None
            None if the next slot may be filled at once; otherwise a transfer to wait for first.

        Raises
        ------
        LinkLost
            The connection broke.
        """

    @abstractmethod
    def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Receive the next message, of ``nbytes`` bytes. Poll for it for a moment, but do not block.

        The moment is at most a few hundred microseconds. Meanwhile, yield the processor to others. ``header`` stays unchanged
        until the message is there.

        Returns
        -------
        Transfer or None
            None if the payload is in slot ``next_in``; otherwise a transfer to wait for first.

        Raises
        ------
        HeaderMismatch
            Another header came, here or from `Transport.wait`.
        LinkLost
            The connection broke.
        """


class Transport(ABC):
    """Ordered, reliable messages between any two ranks of a group: the half of a backend that every collective needs.

    A message is a header of `HEADER_BYTES` bytes and a payload. Core keeps at most one unfinished send and one
    unfinished receive per peer; calls that concern different (peer, direction) pairs may come from several threads at once.
    Payloads are one-dimensional memoryviews of bytes (format ``"B"``) over the caller's array: no copy may be kept.

    Attributes
    ----------
    streams
        If true, messages of any length are sent whole, and `consume` receives those that are to be reduced, without memory of
        core's. If false, core cuts long messages into pieces, and receives what it will reduce into memory of its own, one piece
        while it reduces the other. The same on all ranks.
    """

    streams: bool = False

    @abstractmethod
    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Prepare to talk to ``peers``. Core calls it before the first message to each of them.

        Raises
        ------
        LinkLost
            A peer cannot be reached.
        TimeoutError
            The deadline passed.
        """

    @abstractmethod
    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send a message; do not block. Both arguments stay unchanged until the transfer is done."""

    @abstractmethod
    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive the next message from ``peer`` into ``payload``; do not block.

        The first `HEADER_BYTES` bytes that arrive must equal ``header``. If they differ, this or `wait` raises `HeaderMismatch`
        as soon as they are there, without waiting for a payload. ``payload`` is exactly as long as the message's payload.
        """

    @abstractmethod
    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Return when at least one of ``transfers``, none of which was done, is done.

        After a `TimeoutError` the transfers are still on their way, and may be waited for again.

        Raises
        ------
        HeaderMismatch
            A message was not the expected one.
        LinkLost
            A connection broke, or `Backend.abort` was called.
        Damaged
            A message did not come as it was sent.
        TimeoutError
            The deadline passed.
        """

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        """Start to receive a message of ``nbytes`` bytes, handing each part of it to ``sink`` where it lies; do not block.

        Only transports with `streams` offer it. ``sink(data, offset)`` is called once for each part, in order, from here or from `wait`:
        ``data`` is a read-only memoryview of bytes that is valid during the call alone, ``offset`` where it stands in the payload.
        Every part but the last is a multiple of 64 bytes. The transfer is done when all parts were handed over. An exception of
        the sink passes through, and ends the transport.
        """
        raise NotImplementedError(f"{type(self).__name__} does not stream")

    def mailbox(self, peer: int) -> Mailbox | None:
        """Return a mailbox for short messages to and from ``peer``, or None if the transport has none.

        Core asks once, after `connect`.
        """
        return None

    def close(self) -> None:  # noqa: B027 - a transport that holds nothing of its own need not do anything
        """Give back what only this transport holds, such as its connections. Never blocks; may be called from any thread.

        Core calls it when every rank of its group has finished with the group, so nothing is on its way. When the whole job
        ends, core calls only `Backend.close`.
        """


class Backend(ABC):
    """A way of moving bytes between the ranks of a job; made by the factory that a `BackendSpec` names.

    Attributes
    ----------
    memory
        Which memory it moves, the same on all ranks: ``"cpu"``, by transports, and ``"cuda"``, by device channels.
    """

    memory: frozenset[str] = frozenset({"cpu"})

    @property
    def message_memory(self) -> frozenset[str]:
        """Which memory its sends and receives move; by default the same as ``memory``."""
        return self.memory

    @abstractmethod
    def open_transport(self, channel: int) -> Transport:
        """Return a transport whose messages never mix with those of another channel.

        Core numbers the channels in the same way on all ranks: even numbers for collectives, odd ones for sends and receives.
        Opening one needs no message. Raises `UnsupportedError` if the backend moves no host memory.
        """

    def open_barrier(self, channel: int) -> Transport | None:
        """Return the transport of a group's barriers, or None if they use that of its other collectives.

        ``channel`` is that of the group's collectives. Core opens the transport of the other collectives as well; a barrier
        never runs at the same time as one of them.
        """
        return None

    def open_device(self, channel: int, meeting: DeviceMeeting) -> DeviceChannel:
        """Return the channel that moves the device memory of a group, if the backend does so.

        Raises
        ------
        DeviceFailure
            The library does not come up.
        TimeoutError
            The deadline passed.
        """
        raise NotImplementedError(f"{type(self).__name__} moves no device memory")

    def part(self, name: str) -> Backend | None:
        """Return the part of this backend that has this name; None if there is none."""
        return None

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory that peers read in place, so that messages from it need no copy; None if the backend has none.

        The memory is writable, zeroed and aligned to 64 bytes. It is given back when the last view of it is gone. Raises
        MemoryError when the backend's share is used up.
        """
        return None

    @abstractmethod
    def abort(self) -> None:
        """Wake every thread that waits in a transport of this backend, with `LinkLost`. Called from any thread; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Give back all that the backend holds. Never blocks; twice is fine."""


class BackendConfig(BaseModel):
    """The base of a backend's config model: frozen, and unknown keys are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class Bootstrap(ABC):
    """What a backend's factory gets: who this rank is, its config, and a way to trade cards with the other ranks.

    Attributes
    ----------
    rank, world_size
        Who this rank is.
    config
        The backend's own validated config model.
    host
        The address by which this rank reaches the others. Listen here unless the config names another address.
    deadline
        By when the backend must be ready.
    shared
        A dict in which ranks that are threads of one process find each other; None if ranks are processes.
    hosts
        For each rank, the number of its host.
    local_rank
        This rank's number among the ranks of its host, from 0. It is that of the beginning of the job, even after ranks are
        numbered anew.
    runtime
        The clock and threads of this rank. In a simulated world, ``deadline`` and the deadlines of transports are points on its
        clock.
    """

    rank: int
    world_size: int
    config: BackendConfig
    host: str
    deadline: Deadline
    shared: dict[str, Any] | None
    hosts: tuple[int, ...]
    local_rank: int
    runtime: Runtime

    @abstractmethod
    def describe(self, name: str) -> BackendSpec:
        """Return the spec of another plugin's backend. Raises the same errors as `part`."""

    @abstractmethod
    def part(self, name: str, ranks: Sequence[int] | None = None) -> Backend:
        """Return a backend of another plugin, made with its own config. The caller must close it.

        All ranks of the part must call this, for the same names in the same order. Its transports use the rank numbers of its
        own bootstrap.

        Parameters
        ----------
        name
            The name of the backend.
        ranks
            The ranks of the part, in order, including this one. The part numbers them from 0. By default all ranks of this
            bootstrap.

        Raises
        ------
        BackendUnavailableError
            It is not installed, or cannot run here; the message has the command that installs it. Errors of its factory pass
            through.
        UnknownBackendError
            There is no backend of that name.
        ConfigError
            Its table is wrong, or it is a backend that this one is a part of.
        """

    @abstractmethod
    def exchange(self, name: str, card: bytes) -> list[bytes]:
        """Give this rank's card, and return the cards of all ranks in the order of ranks. All ranks must call it.

        ``card`` is at most 64 KiB. Raises the job's `CommError` if the job ends, and `DeadlineError` if a rank does not come.
        """

    @abstractmethod
    def listen(self, host: str, accept: Callable[[socket.socket, bytes], None]) -> tuple[str, int]:
        """Listen on this host's address ``host``, on a free port; return both.

        When a peer has proved to be a rank of this job, ``accept`` gets a non-blocking socket and the 64 bytes of its hello.
        ``accept`` runs in a background thread and must not block. Raises `RendezvousError` if ``host`` is no address of this
        host, and `AuthenticationError` if it is more than loopback and the job has no secret.
        """

    @abstractmethod
    def dial(self, peer: int, address: tuple[str, int], hello: bytes, deadline: Deadline) -> socket.socket:
        """Connect to where ``peer`` listens, proving to be a rank of this job; return the non-blocking socket.

        ``hello`` is at most 64 bytes. Raises `LinkLost` when the peer cannot be reached, TimeoutError when the deadline passed.
        """


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The request of ``manyhands run``, for a backend that starts its ranks itself."""

    target: str
    """A script's path, or a module's name."""
    is_module: bool
    args: tuple[str, ...]
    ranks: int
    backend: str
    environ: dict[str, str] = field(default_factory=dict)
    """Variables to set for each rank: the chosen config, above all."""
    prefix: bool = True
    """Whether each line of output begins with its rank."""
    config: BackendConfig | None = None
    """The backend's own config."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """The description of a backend; cheap to make, so that a plugin's module stays light.

    Attributes
    ----------
    name
        The name in the config, equal to that of the entry point.
    summary
        One line, for ``manyhands doctor``.
    factory
        ``"module:function"``; the function takes a `Bootstrap` and returns a `Backend`. Imported when the backend is used.
    config
        The model of ``[backends.NAME]``.
    devices
        Where arrays may live: ``"cpu"``, ``"cuda"``.
    capabilities
        Free words that others may ask for: ``"transport"``; ``"virtual time"`` where ranks do not live on the computer's clock.
    probe
        Returns None when the backend can run here, else the reason in words. Must be quick and import nothing heavy.
    install
        The command that helps if it cannot.
    auto_priority
        With ``backend = "auto"``, the highest number wins among the backends that can run. A backend with None is never chosen.
    one_host
        Whether all ranks must be on one host. If they are not, ``auto`` passes it over.
    selection
        ``"package:file"``: a table of algorithms that fits this backend, in the package's folder. The config's ``selection`` is
        read first, then this table, then the default table.
    diagnose
        ``"module:function"`` returning facts for ``manyhands doctor``, as (what, value) pairs: versions, devices, links. It may import what the
        backend needs, and says in words what is missing.
    parts
        For a backend that is composed of others: a function that takes its config, and maps each key that names a backend to
        that name, such as ``{"routes.cpu": "tcp"}``. Missing backends are reported before any rank starts.
    launcher
        ``"module:function"`` taking a `LaunchRequest` and returning an exit code, for a backend whose ranks are not
        processes started by ``manyhands run``.
    api_version
        The version of the contract that the plugin was built for.
    """

    name: str
    summary: str
    factory: str
    config: type[BackendConfig] = BackendConfig
    devices: tuple[str, ...] = ("cpu",)
    capabilities: frozenset[str] = frozenset({"transport"})
    probe: Callable[[], str | None] = lambda: None
    install: str = ""
    auto_priority: int | None = None
    one_host: bool = False
    selection: str | None = None
    diagnose: str | None = None
    parts: Callable[[Any], Mapping[str, str]] | None = None
    launcher: str | None = None
    api_version: int = 1  # not API_VERSION: what was built for an old contract must not seem to be of the present one


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """A kind of call, put to ``manyhands_collective`` once and remembered."""

    backend: str
    collective: Collective
    device: str
    dtype: np.dtype[np.generic] | None
    op: str | None
    nbytes: int
    world_size: int
    even: bool = True
    """Whether the blocks of all ranks are of one size."""
    digest: bytes = b""
    """Eight bytes that differ between ranks that do not make the same call."""


NativeCollective = Callable[
    ["Backend", "npt.NDArray[np.generic]", "npt.NDArray[np.generic]", int, "Deadline", Callable[[list[int]], None]], None
]
"""``native(backend, source, target, root, deadline, on_stall)``: performs a collective that a plugin offered.

``source`` and ``target`` are one-dimensional and C-contiguous. They are empty if this rank holds none, and may be the same
memory if the collective allows that. For a mean, the native also divides. At the deadline it raises TimeoutError. While it
waits, it calls ``on_stall`` with the ranks that it waits for, or with an empty list if it cannot tell, after 0.4 s and then
every 0.5 s. So core finds calls that can never end. It raises `LinkLost`, or `HeaderMismatch` with as much of the other's
header as it knows, which may be nothing."""
