"""The control planes of several processes in one thread, with every message, timer and death in an order that a seed chooses."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from oneaccord.contract.deadline import Deadline
from oneaccord.control import failover, remote, server
from oneaccord.control.connection import make_join
from oneaccord.control.failover import Failover
from oneaccord.control.protocol import Join, Report, Shrink, Shrunk, Verdict
from oneaccord.control.remote import SocketControl
from oneaccord.control.store import Store
from oneaccord.errors import RendezvousError
from oneaccord.net.credentials import Credentials
from oneaccord.net.keepalive import Liveness
from oneaccord.net.network import Address

__all__ = ["Network", "Process", "network_of"]

_HORIZON_S = 100.0
_STORE = ("host0", 1)


class End:
    """One end of a connection: stands for a socket, and for what sends frames over it."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.peer: End
        self.coming: deque[bytes | None] = deque()
        """What was sent here and not yet read; None is the end."""
        self.frames: Frames | None = None
        self.is_open = True
        self.certificate = ""
        process.ends.append(self)

    def getsockname(self) -> Address:
        return f"host{self.process.rank}", 0

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.peer.coming.append(None)


class Frames:
    """In the place of `FrameConnection`."""

    def __init__(
        self, loop: Loop, end: End, on_frame: Callable[[bytes | None], None], on_lost: Callable[[str], None], *_: object
    ) -> None:
        self.flaw = ""
        self.vanished = False
        self._loop = loop
        self._end = end
        self._on_frame = on_frame
        self._on_lost = on_lost
        loop.call(lambda: setattr(end, "frames", self))

    def send(self, frame: bytes, *, within_s: float = 0.0) -> None:
        self._loop.call(lambda: self._end.is_open and self._end.peer.coming.append(frame))

    def close(self) -> None:
        self._loop.call(self._end.close)

    def read(self) -> None:
        """Take in the next of what has come."""
        frame = self._end.coming.popleft()
        if frame is None:
            self._end.close()
            self._on_lost("the connection was closed")
        else:
            self._on_frame(frame)


class Loop:
    """In the place of the background loop of a process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self.calls: deque[Callable[[], object]] = deque()

    def call(self, function: Callable[[], object]) -> None:
        self.calls.append(function)

    def own(self, _: object) -> bool:
        """Own a connection or a place, which ends with the process anyway."""
        return self._process.is_alive

    def call_later(self, delay_s: float, function: Callable[[], object]) -> None:
        network = self._network
        network.timers.append((network.now + delay_s, next(network.count), self._process, function))


class Listener:
    """In the place of a listener: where it listens is what was given as its socket."""

    def __init__(self, _: Loop, place: Place, __: object, accept: Callable[[Any, bytes], None], *___: object) -> None:
        self._place = place
        place.accept = accept

    def close(self) -> None:
        self._place.close()


class Place:
    """An address at which a process listens, or will."""

    def __init__(self, network: Network, process: Process, address: Address) -> None:
        self.process = process
        self.address = address
        self.accept: Callable[[Any, bytes], None] | None = None
        self._network = network

    def getsockname(self) -> Address:
        return self.address

    def listen(self, _: int = 0) -> Place:
        if self.process.is_alive:
            self._network.places[self.address] = self
        return self

    def close(self) -> None:
        self._network.places.pop(self.address, None)


class Process:
    """One rank: its control connection, its part in going on without the store, and, on rank 0, the store."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        self.network = network
        self.rank = rank
        self.is_alive = True
        self.is_stopped = False
        self.ends: list[End] = []
        self.loop: Any = Loop(network, self)
        self.control: SocketControl
        self._size = size

    def begin(self) -> None:
        """Come into the job."""
        credentials, deadline, liveness = Credentials(b"secret"), Deadline(1e6), Liveness()
        if self.rank == 0:
            place: Any = Place(self.network, self, _STORE).listen()
            Store(self.loop, place, credentials, self._size, deadline, liveness)
        self.control = SocketControl(self.loop, self._join(), _STORE, credentials, deadline, liveness)
        Failover(self.loop, self.control, credentials, liveness, None)
        self.control.on_failure(self.go_on)
        self.control.on_gone(self.try_again)

    def _join(self) -> Join:
        host = self.network.processes_of()
        return msgspec.structs.replace(make_join(self.rank, self._size, "tcp", ""), pid=self.rank, host=host)

    @property
    def verdict(self) -> Verdict | None:
        """The first cause, as this rank knows it."""
        return self.control.verdict

    @property
    def answer(self) -> Shrunk | None:
        """What this rank was told as it asked to go on."""
        return self.control.recovery._shrunk

    @property
    def goes_on(self) -> bool:
        """Whether this rank was told with whom it goes on, and can meet them: they were told the same."""
        answer = self.answer
        met = [] if answer is None or answer.problem is not None else [self.network.processes[rank] for rank in answer.ranks]
        return self.is_alive and bool(met) and all(other.is_alive and other.answer == answer for other in met)

    @property
    def knows_all(self) -> bool:
        """Whether it is the store's successor, and all ranks have come to it."""
        return self.control.standby_store is not None and len(self.control.standby_store._members) == self._size

    def go_on(self) -> None:
        """Ask to go on, as `Control.shrink` does."""
        self.control.recovery._shrink = Shrink(f"host{self.rank}", 1000 + self.rank, 10.0)
        self.control._post(self.control.recovery._shrink)

    def try_again(self, rank: int, _: str) -> None:
        """Ask once more where one of those has ended with whom this rank was told to go on: it does not meet them."""
        answer = self.answer
        if answer is not None and rank in answer.ranks:
            self.control.recovery._shrunk = None
            self.go_on()

    def report(self, peer: int) -> None:
        """Say that another rank is lost, as `Control.report` does."""
        found = Report("lost", f"rank {self.rank} found rank {peer} lost", peer)
        control = self.control

        def again() -> None:
            if not control.failed and control._turn_to_successor():
                control._post(found)
                self.loop.call_later(1.0, give_up)
            else:
                give_up()

        def give_up() -> None:
            if not control.failed:
                control._give_up(found)

        if not control.failed:
            control._post(found)
            self.loop.call_later(1.0, again)

    def die(self) -> None:
        """End, with some of what was sent last perhaps lost."""
        self.is_alive = False
        for place in [place for place in self.network.places.values() if place.process is self]:
            place.close()
        for end in self.ends:
            if end.is_open:
                for _ in range(self.network.choice.choice((0, 0, 1, 2))):
                    if end.peer.coming and end.peer.coming[-1] is not None:
                        end.peer.coming.pop()
                end.close()


class Network:
    """What happens between some processes, one thing after the other.

    Parameters
    ----------
    size
        How many ranks there are.
    seed
        What chooses the order.
    per_host
        How many of them a host has.
    """

    def __init__(self, size: int, seed: int, per_host: int = 100) -> None:
        self._per_host = per_host
        self.choice = random.Random(seed)
        self.now = 0.0
        self.count = itertools.count()
        self.timers: list[tuple[float, int, Process, Callable[[], object]]] = []
        self.places: dict[Address, Place] = {}
        self.ports = itertools.count(10)
        self.steps = 0
        self._now_running: Process
        self.processes = [Process(self, rank, size) for rank in range(size)]

    def begin(self) -> None:
        """Let all ranks come."""
        for process in self.processes:
            self._run(process, process.begin)

    def _run(self, process: Process, function: Callable[[], object]) -> None:
        self._now_running = process
        function()

    def dial(self, address: Address, *_: object) -> End:
        """Connect the running process to a place; the other side hears of it later."""
        place = self.places.get(address)
        if place is None:
            raise RendezvousError(f"nobody listens at {address}")
        ours, theirs = End(self, self._now_running), End(self, place.process)
        ours.peer, theirs.peer = theirs, ours
        hello = next(each for each in _ if isinstance(each, bytes))

        def accept() -> None:
            if place.accept is None or self.places.get(address) is not place:
                theirs.close()
            else:
                place.accept(theirs, hello)

        place.process.loop.call(accept)
        return ours

    def bind(self, address: Address, *_: object) -> Place:
        """Let the running process listen."""
        return Place(self, self._now_running, (address[0], next(self.ports))).listen()

    def hold(self, host: str) -> Place:
        """Let the running process have an address at which it does not listen yet."""
        return Place(self, self._now_running, (host, next(self.ports)))

    def processes_of(self, *_: str) -> str:
        """Return which host the running process is on."""
        return f"host{self._now_running.rank // self._per_host}"

    def has_ended(self, pid: int) -> bool:
        """Tell whether the process of a rank has ended."""
        return not self.processes[pid].is_alive

    def step(self) -> bool:
        """Let one thing happen; tell whether anything could."""
        able: list[tuple[Process, Callable[[], object]]] = []
        for process in self.processes:
            if not process.is_alive or process.is_stopped:
                continue
            if process.loop.calls:
                able.append((process, process.loop.calls[0]))
            able += [
                (process, end.frames.read) for end in process.ends if end.is_open and end.frames is not None and end.coming
            ]
        if able:
            process, function = self.choice.choice(able)
            if process.loop.calls and function is process.loop.calls[0]:
                process.loop.calls.popleft()
        else:
            self.timers = [timer for timer in self.timers if timer[2].is_alive]
            due = [timer for timer in self.timers if not timer[2].is_stopped and timer[0] <= _HORIZON_S]
            if not due:
                return False
            timer = min(due)
            self.timers.remove(timer)
            self.now, _, process, function = max(self.now, timer[0]), *timer[1:]
        self.steps += 1
        self._run(process, function)
        return True

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let things happen until nothing more does, or some condition holds."""
        while not until() and self.step():
            pass


class _Thread:
    """In the place of a thread: what it is to run is run by the loop."""

    def __init__(self, target: Callable[..., object], args: tuple[object, ...] = (), **_: object) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        control = self._target.__self__._control  # type: ignore[attr-defined]
        control._loop.call(lambda: self._target(*self._args))

    def join(self, _: float) -> None:
        pass

    def is_alive(self) -> bool:
        return False


@contextlib.contextmanager
def network_of(size: int, seed: int, monkeypatch: pytest.MonkeyPatch, per_host: int = 100) -> Iterator[Network]:
    """Put a simulated network under the control planes of this process."""
    network = Network(size, seed, per_host)
    with monkeypatch.context() as patch:
        for module in (remote, server):
            patch.setattr(module, "FrameConnection", Frames)
        patch.setattr(server, "Listener", Listener)
        for module in (remote, failover):
            patch.setattr(module, "dial_patiently", network.dial)
        patch.setattr(failover, "dial", network.dial)
        patch.setattr(remote, "neighbourhood", network.processes_of)
        patch.setattr(remote, "has_ended", network.has_ended)
        patch.setattr(remote, "hold", network.hold)
        patch.setattr(failover, "guarded_bind", network.bind)
        patch.setattr(failover, "Thread", _Thread)
        yield network
