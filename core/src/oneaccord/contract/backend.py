"""The interface of a backend: the abstract classes that a plugin implements, and the description that it registers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from oneaccord.contract.spec import (
    API_VERSION,
    BackendSpec,
    CollectiveRequest,
    LaunchRequest,
    NoConfig,
)
from oneaccord.contract.transport import (
    HEADER_BYTES,
    Damaged,
    HeaderMismatch,
    LinkLost,
    Mailbox,
    Sink,
    Transfer,
    Transport,
)

if TYPE_CHECKING:
    import socket
    from types import ModuleType

    import numpy as np
    import numpy.typing as npt

    from oneaccord.contract.deadline import Deadline
    from oneaccord.contract.device import DeviceChannel, DeviceMeeting
    from oneaccord.contract.runtime import Runtime
    from oneaccord.contract.seal import Seal

__all__ = [
    "API_VERSION",
    "HEADER_BYTES",
    "Backend",
    "BackendSpec",
    "Bootstrap",
    "CollectiveRequest",
    "Damaged",
    "HeaderMismatch",
    "LaunchRequest",
    "LinkLost",
    "Mailbox",
    "NativeCollective",
    "NoConfig",
    "Sink",
    "Transfer",
    "Transport",
]


class Backend(ABC):
    """A way of moving bytes between the ranks of a job; made by the factory that a `BackendSpec` names, once for each job.

    A backend ends by `abort` and `close`, in this order, whether the job went well or not. Either may come again, also `abort` after `close`.
    From the first `abort` on, every wait in a transport raises `LinkLost`. So does every later call, and the wait for a transfer that
    such a call returns: another thread may be about to make one. A call that waits for nothing may return, such as
    `Transport.connect` to a connected peer. Core calls no method in a forked child of the process.

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

        Opening one needs no message, and does not block. Core opens each channel at most once, in any thread, when the group first needs it:
        so one rank may open a channel and send on it long before the others open it.

        Parameters
        ----------
        channel
            Its number, alike on all ranks: even for collectives, odd for sends and receives. Less than 2**32, and never used
            again after `Transport.close`.

        Returns
        -------
        Transport
            The transport. Its peers are ranks of this backend, as `Bootstrap` numbers them, also for a group of only some of them.

        Raises
        ------
        UnsupportedError
            The backend moves no host memory.
        """

    def open_barrier(self, channel: int) -> Transport | None:
        """Return the transport of a group's barriers; None, the default, if they use that of its other collectives.

        Core opens the transport of the other collectives as well; a barrier never runs at the same time as one of them.

        Parameters
        ----------
        channel
            That of the group's collectives.

        Returns
        -------
        Transport or None
            The transport.
        """
        return None

    def open_device(self, channel: int, meeting: DeviceMeeting) -> DeviceChannel:
        """Return the channel that moves the device memory of a group, if the backend does so.

        All ranks of a new group call it, in the thread that makes the group; it may block until the deadline of the meeting.

        Parameters
        ----------
        channel
            As for `open_transport`.
        meeting
            The ranks of the group, and the way in which they trade cards.

        Returns
        -------
        DeviceChannel
            The channel.

        Raises
        ------
        DeviceFailure
            The library does not come up.
        TimeoutError
            The deadline passed.
        """
        raise NotImplementedError(f"the backend {type(self).__name__} cannot move device memory")

    def part(self, name: str) -> Backend | None:
        """Return a part of this backend, for ``Group.backend``.

        Parameters
        ----------
        name
            The name of the part's backend.

        Returns
        -------
        Backend or None
            The part; None, the default, if no part has that name.
        """
        return None

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory that peers read in place, so that messages from it need no copy. Called in any thread.

        Parameters
        ----------
        nbytes
            How many bytes, at least 1.

        Returns
        -------
        memoryview or None
            The memory: writable, zeroed and aligned to 64 bytes. It is given back when its last view is gone, which may be after `close`.
            None, the default, if the backend has none.

        Raises
        ------
        MemoryError
            The backend's share is used up.
        """
        return None

    @abstractmethod
    def abort(self) -> None:
        """Wake every thread that waits in a transport of this backend, with `LinkLost`.

        Called when the job fails, and before `close`; from any thread, also a thread of core that must continue. Never blocks and never raises.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back all that the backend holds: connections, threads, memory. Called after `abort`, from any thread.

        If the job went well, every rank has had its last message. Never blocks and never raises: a thread that does not end is left
        behind as a daemon.
        """


class Bootstrap(ABC):
    """The arguments of a backend's factory: this rank, its config, and ways to find the other ranks.

    The methods may be called in the factory. `dial` may be called later too, from any thread, until the backend is closed. Each blocks no longer
    than its deadline allows, and raises the job's `CommError` if the job ends meanwhile.

    Attributes
    ----------
    rank, world_size
        The number of this rank, and the number of all ranks.
    config
        The backend's own validated config, an instance of `BackendSpec.config`.
    host
        The address by which this rank reaches the others. Listen here unless the config names another address.
    deadline
        By when the backend must be ready.
    shared
        A dict in which ranks that are threads of one process find each other; None if ranks are processes.
    hosts
        For each rank, the number of its host.
    local_rank
        This rank's number among the ranks of its host, from 0. It is the number at the beginning of the job, even after ranks are
        renumbered.
    runtime
        The clock and threads of this rank. In a simulated world, ``deadline`` and the deadlines of transports are points on its
        clock.
    native
        The module ``oneaccord_native``, the compiled executor; None if it is not installed or is switched off. Python can do
        all its work, so a backend need not use it. Ranks with and without it must understand each other.
    """

    rank: int
    world_size: int
    config: Any
    host: str
    deadline: Deadline
    shared: dict[str, Any] | None
    hosts: tuple[int, ...]
    local_rank: int
    runtime: Runtime
    native: ModuleType | None = None

    @abstractmethod
    def describe(self, name: str) -> BackendSpec:
        """Return the spec of another plugin's backend.

        Parameters
        ----------
        name
            Its name.

        Returns
        -------
        BackendSpec
            The spec.

        Raises
        ------
        BackendUnavailableError, UnknownBackendError, ConfigError
            As for `part`.
        """

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

        Returns
        -------
        Backend
            The part.

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
        """Give this rank's card, and return the cards of all ranks. All ranks must call it, in the same order.

        The cards travel over core's authenticated connections. They are not encrypted: anyone who can read the network can read them.

        Parameters
        ----------
        name
            The subject of the cards; part of the error if a rank does not come.
        card
            At most 64 KiB, such as `write_card` makes.

        Returns
        -------
        list of bytes
            The cards, in the order of ranks.

        Raises
        ------
        DeadlineError
            A rank did not come by `deadline`; the message names it.
        CommError
            The job ended.
        """

    @abstractmethod
    def listen(self, host: str, accept: Callable[[socket.socket, bytes], None]) -> tuple[str, int]:
        """Listen for ranks of this job, on a free port. Core closes the listener with the job, and in forked children.

        Parameters
        ----------
        host
            An address of this host, such as the attribute ``host``.
        accept
            ``accept(sock, hello)`` gets a connected, non-blocking stream socket when a peer has proved to be a rank of this job, and the 64 bytes
            that it gave to `dial`. It runs in a background thread, must not block, and may be called before this method has returned. The
            socket is the backend's to close. An exception in it ends the job.

        Returns
        -------
        (str, int)
            The address and the port, for a card.

        Raises
        ------
        RendezvousError
            ``host`` is no address of this host.
        AuthenticationError
            It is more than loopback, and the job has no secret.
        """

    @abstractmethod
    def dial(self, peer: int, address: tuple[str, int], hello: bytes, deadline: Deadline) -> socket.socket:
        """Connect to the address of a rank, proving to be a rank of this job. Only that rank's listener for this backend takes the connection.

        Parameters
        ----------
        peer
            The rank.
        address
            The result of its `listen`.
        hello
            At most 64 bytes, for the other side's ``accept``, which gets them padded with zeros to 64. Say in it which rank and which channel this is.
        deadline
            By when.

        Returns
        -------
        socket.socket
            The connected, non-blocking stream socket, which belongs to the backend, and which it must close. With ``security.tls`` its methods encrypt
            everything that they send and receive, one method at a time. An OSError with the number EBADMSG then says that the received bytes are not the sent ones. After a
            ``send`` that raised BlockingIOError, the next one must have the same bytes. Wait for the descriptor only after
            ``recv`` has raised BlockingIOError: the socket may have read more than it has returned.

        Raises
        ------
        LinkLost
            The peer cannot be reached.
        TimeoutError
            The deadline passed.
        """

    def is_from(self, sock: socket.socket, peer: int) -> bool:
        """Return whether a connection that ``accept`` got may be from the rank in its hello, according to its certificate.

        A backend asks this before it takes the connection for that rank's, and closes the connection if not. It does not block. Without
        ``security.tls`` there is nothing to compare.

        Parameters
        ----------
        sock
            The connection.
        peer
            The rank.

        Returns
        -------
        bool
            False if its certificate has other names than the one with which that rank has come to the job, of which a warning is logged, or if
            there is no such rank.
        """
        return True

    def seals(self, sock: socket.socket) -> tuple[Seal, Seal] | None:
        """Return the seals for the messages of a connection, if ``security.checksum`` is set.

        A backend whose `BackendSpec.checksum` is True puts the seals into every message, and raises `Damaged` if a seal is wrong.

        Parameters
        ----------
        sock
            A connection that `dial` returned, or that `listen` handed over.

        Returns
        -------
        tuple of Seal and Seal, or None
            The seal for messages to that rank, and the seal for messages from it, the same each time; None if messages need no seals.
        """
        return None


NativeCollective = Callable[
    [Backend, "npt.NDArray[np.generic]", "npt.NDArray[np.generic]", int, "Deadline", Callable[[list[int]], None]], None
]
"""``native(backend, source, target, root, deadline, on_stall)``: performs a collective that a plugin offered.

``source`` and ``target`` are one-dimensional and C-contiguous. They are empty if this rank holds none, and may be the same
memory if the collective allows that. For a mean, the native also divides. At the deadline it raises TimeoutError. While it
waits, it calls ``on_stall`` with the ranks that it waits for, or with an empty list if it does not know, after 0.4 s and then
every 0.5 s. So core finds calls that can never end. It raises `LinkLost`, or `HeaderMismatch` with as much of the other's
header as it knows, which may be nothing. Core calls one native at a time for a group, in any thread."""
