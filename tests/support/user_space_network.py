"""Hosts on one machine, and the network between them as a thread carries it: packets are lost, late, held back or cut off as a test wants.

Each host is a network namespace with a TUN device, so that the kernel's own IP and TCP are at work, also where it has no netem. It needs root, iproute2
and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

__all__ = ["ENTER", "Network", "can_make_networks"]

_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_MOST_PACKETS = 1000

ENTER = """
import ctypes, os, socket
_library = ctypes.CDLL(None, use_errno=True)
_namespace = os.open(os.environ["NAMESPACE"], os.O_RDONLY)
if _library.setns(_namespace, 0x40000000) or _library.unshare(0x04000000):  # CLONE_NEWNET, CLONE_NEWUTS
    raise OSError(ctypes.get_errno(), "setns or unshare")
os.close(_namespace)
socket.sethostname(os.path.basename(os.environ["NAMESPACE"]))
"""
"""Put in front of a program, it makes it one of the host whose namespace is at the path ``NAMESPACE``, with a host name of its own."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True)


def _set_namespace(number: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(number, _NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def can_make_networks() -> bool:
    """Tell whether hosts can be made here."""
    if os.geteuid() or shutil.which("ip") is None or not os.access("/dev/net/tun", os.W_OK):
        return False
    try:
        with Network(1):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@dataclass
class Network:
    """Some hosts that reach each other; to be used by ``with``.

    Attributes
    ----------
    count
        How many hosts there are.
    mtu
        The longest packet, in bytes.
    is_ipv6
        Whether the hosts have addresses of IPv6 alone.
    seed
        Decides which packets are lost.
    loss, delay_s, bytes_per_s
        Of all packets: which part is lost, how long each takes, and how many bytes leave a host in a second. They may be changed at any time.
    groups
        Which hosts reach each other; by default all do.
    """

    count: int
    mtu: int = 1500
    is_ipv6: bool = False
    seed: int = 0
    loss: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    groups: Sequence[Sequence[int]] = ()
    _names: list[str] = field(default_factory=list)
    _devices: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._chance = random.Random(self.seed)
        self._over = threading.Event()
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            for number in range(self.count):
                self._add_host(number, home)
        except BaseException:
            self._remove()
            raise
        finally:
            os.close(home)
        self._thread = threading.Thread(target=self._carry, name="network", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._remove()

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"fd78::{host + 1:x}" if self.is_ipv6 else f"10.78.0.{host + 1}"

    def namespace(self, host: int) -> str:
        """Return the path of a host's namespace."""
        return f"/run/netns/{self._names[host]}"

    @contextlib.contextmanager
    def entered(self, host: int) -> Iterator[None]:
        """Let this thread be on a host for a while; the sockets that it opens stay there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            with Path(self.namespace(host)).open() as namespace:
                _set_namespace(namespace.fileno())
            yield
        finally:
            _set_namespace(home)
            os.close(home)

    def end_all(self) -> None:
        """Kill what runs on the hosts."""
        for name in self._names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
            for pid in map(int, found.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def cut(self, *groups: Sequence[int]) -> Iterator[None]:
        """Let only hosts of one group reach each other, for a while."""
        before, self.groups = self.groups, groups
        try:
            yield
        finally:
            self.groups = before

    def _add_host(self, number: int, home: int) -> None:
        name = f"oa-{os.getpid()}-{number}"
        _ip("netns", "add", name)
        self._names.append(name)
        with Path(f"/run/netns/{name}").open() as namespace:
            _set_namespace(namespace.fileno())  # of this thread alone
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._devices.append(device)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"net", _TUN_WITHOUT_HEADER))
        finally:
            _set_namespace(home)
        where = (self.address(number) + "/64", "nodad") if self.is_ipv6 else (self.address(number) + "/24",)
        _ip("-n", name, "addr", "add", where[0], "dev", "net", *where[1:])
        _ip("-n", name, "link", "set", "net", "mtu", str(self.mtu))
        _ip("-n", name, "link", "set", "net", "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for device in self._devices:
            os.close(device)
        for name in self._names:
            _ip("netns", "del", name)

    def _carry(self) -> None:
        """Carry packets until the end."""
        waiting: list[tuple[float, int, int, bytes]] = []
        free_at = [0.0] * self.count
        order = 0
        while not self._over.is_set():
            pause = 0.05 if not waiting else min(0.05, max(0.0, waiting[0][0] - time.monotonic()))
            ready, _, _ = select.select(self._devices, [], [], pause)
            for device in ready:
                source = self._devices.index(device)
                for packet in _packets(device):
                    target = packet[39] - 1 if packet[0] >> 4 == 6 else packet[19] - 1
                    if not 0 <= target < self.count or not self._lets_through(source, target):
                        continue
                    at = time.monotonic()
                    if self.bytes_per_s:
                        at = free_at[source] = max(at, free_at[source]) + len(packet) / self.bytes_per_s
                    order += 1
                    heapq.heappush(waiting, (at + self.delay_s, order, target, packet))
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, target, packet = heapq.heappop(waiting)
                with contextlib.suppress(BlockingIOError):  # a full queue loses packets, as anywhere
                    os.write(self._devices[target], packet)
            del waiting[_MOST_PACKETS * self.count :]

    def _lets_through(self, source: int, target: int) -> bool:
        if self.groups and not any(source in group and target in group for group in self.groups):
            return False
        return not self.loss or self._chance.random() >= self.loss


def _packets(device: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):
            yield os.read(device, 65536)
