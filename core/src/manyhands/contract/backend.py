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
"""What takes the parts of a message: ``sink(data, offset)``."""


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
    """What came from ``peer``, or did not come, is not what it sent. A transport that can tell raises it; no call is given such bytes."""

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
        How many bytes have moved so far: what tells a slow message from one that stands still.
    """

    __slots__ = ("done", "moved")

    done: bool
    moved: int


class Mailbox(ABC):
    """Short messages to and from one peer, in memory that the transport owns: no objects are made, and nothing is looked up.

    The messages are the same as those of `Transport.send` and `Transport.recv`, and in one order with them: a rank may use either way,
    whatever its peer does. Of each mailbox one thread at a time posts, and one fetches.

    Core writes a payload into ``outgoing[next_out]`` and posts it; it fetches a payload and reads it in ``incoming[next_in]``, where it
    stays unchanged until the next fetch or receive from this peer.

    Attributes
    ----------
    outgoing, incoming
        One or more slots, each a memoryview of bytes for one payload; all of one length, which is the longest payload.
    next_out
        The slot to fill next; it may be filled at any time but while a transfer that `post` returned is not done.
    next_in
        The slot in which the payload fetched last lies.
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
            None when the next slot may be filled at once, else what to wait for before.

        Raises
        ------
        LinkLost
            The connection broke.
        """

    @abstractmethod
    def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Receive the next message, of ``nbytes`` bytes; wait for it actively for a moment, but do not block.

        The moment is at most a few hundred microseconds, and the processor is given to whoever else needs it meanwhile. ``header`` stays
        unchanged until the message is there.

        Returns
        -------
        Transfer or None
            None when the payload is in slot ``next_in``, else what to wait for until it is.

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
        Whether messages of any length are sent whole, and those to be reduced come by `consume`, which needs no memory of core's.
        Otherwise core cuts what is long into pieces, and receives into memory of its own what it will reduce. Alike on all ranks.
    """

    streams: bool = False

    @abstractmethod
    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Make ready to talk to ``peers``; core calls it before the first message to each of them.

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

        The first `HEADER_BYTES` bytes that arrive must equal ``header``; where they do not, `HeaderMismatch` is raised here or
        by `wait` as soon as they are there, without waiting for a payload. The payload is exactly as long as the message's.
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
            A connection broke, also because `Backend.abort` was called.
        Damaged
            A message did not come as it was sent.
        TimeoutError
            The deadline passed.
        """

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        """Start to receive a message of ``nbytes`` bytes, handing each part of it to ``sink`` where it lies; do not block.

        Only transports with `streams` offer it. ``sink(data, offset)`` is called once for each part, in order, from here or from `wait`:
        ``data`` is a read-only memoryview of bytes that is valid during the call alone, ``offset`` where it stands in the payload.
        Every part but the last is a multiple of 64 bytes. The transfer is done when all parts were handed over. What the sink raises
        passes through, and ends the transport.
        """
        raise NotImplementedError(f"{type(self).__name__} does not stream")

    def mailbox(self, peer: int) -> Mailbox | None:
        """Return what makes short messages to and from ``peer`` fast, None where there is no such thing.

        Core asks once, after `connect`.
        """
        return None

    def close(self) -> None:  # noqa: B027 - a transport that holds nothing of its own need not do anything
        """Give back what this transport alone holds, such as its connections. Never blocks; from any thread.

        Core calls it once every rank of its group has finished with the group, so that nothing is on its way; not when the
        whole job ends, where `Backend.close` follows anyway.
        """


class Backend(ABC):
    """A way of moving bytes between the ranks of a job; made by the factory that a `BackendSpec` names.

    Attributes
    ----------
    memory
        Which memory it moves, alike on all ranks: ``"cpu"``, by transports, and ``"cuda"``, by device channels.
    """

    memory: frozenset[str] = frozenset({"cpu"})

    @property
    def message_memory(self) -> frozenset[str]:
        """Which memory it moves by sends and receives; by default all that it moves."""
        return self.memory

    @abstractmethod
    def open_transport(self, channel: int) -> Transport:
        """Return a transport whose messages never mix with those of another channel.

        Channels are numbered by core, alike on all ranks, even ones for collectives and odd ones for sends and receives; opening one
        needs no message. Raises `UnsupportedError` where the backend moves no host memory.
        """

    def open_barrier(self, channel: int) -> Transport | None:
        """Return the transport of a group's barriers, where they go another way than its other collectives; None where they do not.

        ``channel`` is that of the group's collectives, whose transport core opens as well; a barrier and another one never run at once.
        """
        return None

    def open_device(self, channel: int, meeting: DeviceMeeting) -> DeviceChannel:
        """Return what moves the device memory of a group, for a backend that does so.

        Raises
        ------
        DeviceFailure
            The library does not come up.
        TimeoutError
            The deadline passed.
        """
        raise NotImplementedError(f"{type(self).__name__} moves no device memory")

    def part(self, name: str) -> Backend | None:
        """Return the backend of a name that this one is composed of; None where it is not."""
        return None

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory that peers read in place, so that messages from it need no copy on the way; None where there is no such.

        It is writable, zeroed, aligned to 64 bytes, and given back when the last view of it is gone. Raises MemoryError when
        the backend's share is used up.
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
        The address by which this rank reaches the others: listen here unless the config asks for another one.
    deadline
        Until when the backend must be ready.
    shared
        Where ranks that are threads of one process find each other; None where ranks are processes.
    hosts
        For each rank a number that it shares with the ranks of its host.
    local_rank
        Which of the ranks of its host this one is, counted from 0, as the job began: it stays when ranks are numbered anew.
    runtime
        What this rank runs on; where it is simulated, ``deadline`` and those of transports are points on its clock.
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
        """Return what another plugin says of its backend; raises as `part`."""

    @abstractmethod
    def part(self, name: str, ranks: Sequence[int] | None = None) -> Backend:
        """Return a backend of another plugin, made with its own config; whoever asks must close it.

        All of its ranks must call it, for the same names in the same order. Its transports count ranks as its own bootstrap does.

        Parameters
        ----------
        name
            The name of the backend.
        ranks
            The ranks that it is for, in their order, this one among them; in it they are numbered from 0. By default all of this bootstrap.

        Raises
        ------
        BackendUnavailableError
            It is not installed, or cannot run here; with the command that installs it. Also what its factory raises.
        UnknownBackendError
            There is no backend of that name.
        ConfigError
            Its table is wrong, or it is a backend that this one is a part of.
        """

    @abstractmethod
    def exchange(self, name: str, card: bytes) -> list[bytes]:
        """Give this rank's card and return those of all ranks, in the order of ranks; all ranks must call it.

        ``card`` is at most 64 KiB. Raises the `CommError` that ended the job if one does, `DeadlineError` when a rank
        does not come.
        """

    @abstractmethod
    def listen(self, host: str, accept: Callable[[socket.socket, bytes], None]) -> tuple[str, int]:
        """Listen on this host's address ``host``, on a free port; return both.

        Whoever proves to be a rank of this job is handed to ``accept``, as a non-blocking socket and the 64 bytes of its hello;
        ``accept`` runs in a background thread and must not block. Raises `RendezvousError` when ``host`` is no address of this
        host, `AuthenticationError` when it is more than loopback and the job has no secret.
        """

    @abstractmethod
    def dial(self, peer: int, address: tuple[str, int], hello: bytes, deadline: Deadline) -> socket.socket:
        """Connect to where ``peer`` listens, proving to be a rank of this job; return the non-blocking socket.

        ``hello`` is at most 64 bytes. Raises `LinkLost` when the peer cannot be reached, TimeoutError when the deadline passed.
        """


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What ``manyhands run`` was asked for, for a backend that starts its ranks itself."""

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
        The command that would help when it cannot.
    auto_priority
        With ``backend = "auto"`` the highest wins among those that can run; None is never chosen.
    one_host
        Whether all ranks must be on one host; ``auto`` passes it over where they are not.
    selection
        ``"package:file"``, the table of algorithms that fits this backend, in the package's folder; it comes before the one of manyhands,
        and the config's ``selection`` before both.
    diagnose
        ``"module:function"`` returning facts for ``manyhands doctor``, as (what, value) pairs: versions, devices, links. It may import what the
        backend needs, and says in words what is missing.
    parts
        For a backend that is composed of others: takes its config, and returns the names of those by the keys that name them, such as
        ``{"routes.cpu": "tcp"}``. They are looked for before any rank starts.
    launcher
        ``"module:function"`` taking a `LaunchRequest` and returning an exit code, for a backend whose ranks are not
        processes started by ``manyhands run``.
    api_version
        The contract that the plugin was built for.
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
    api_version: int = API_VERSION


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

``source`` and ``target`` are one-dimensional and C-contiguous, empty where this rank holds none, and may be the same memory where the
collective allows that. Means are divided by the native. It ends by the deadline with TimeoutError, and calls ``on_stall`` with the
ranks it waits for, or with none if it cannot tell, after 0.4 s and then every 0.5 s: so calls are found that can never end. It
raises `LinkLost`, or `HeaderMismatch` with what it knows of the other's header, which may be nothing."""
