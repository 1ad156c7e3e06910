"""Hosts that a test can part, as network namespaces of Linux: each has an address of its own, on one of two switches that a cable joins."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

__all__ = ["IN_ITS_HOST", "Hosts", "hosts", "why_not"]

IN_ITS_HOST = """
import ctypes
with open("/run/netns/" + os.environ["HOST"]) as namespace:
    assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, ctypes.get_errno()
"""
"""Put in front of a program, it moves the rank to its host."""


@functools.cache
def why_not() -> str:
    """Return why there can be no namespaces here; nothing where there can."""
    if os.geteuid():
        return "only root makes network namespaces"
    if shutil.which("ip") is None:
        return "the command `ip` is not installed"
    name = f"mh-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if not made.returncode:
        bridge = ["ip", "-n", name, "link", "add", "switch", "type", "bridge"]
        made = subprocess.run(bridge, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return "" if not made.returncode else f"no network namespaces here: {made.stderr.strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """Some hosts.

    Parameters
    ----------
    sides
        For each host the switch that it is at, 0 or 1.

    Attributes
    ----------
    names
        The names of their namespaces.
    """

    def __init__(self, sides: Sequence[int]) -> None:
        self._switch = f"mh{os.getpid()}-switch"
        self.names = [f"mh{os.getpid()}-{number}" for number in range(len(sides))]
        for name in (self._switch, *self.names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for side in (0, 1):
            _ip("-n", self._switch, "link", "add", f"switch{side}", "type", "bridge")
            _ip("-n", self._switch, "link", "set", f"switch{side}", "up")
        self._plug("cable0", 0, "cable1", self._switch)
        _ip("-n", self._switch, "link", "set", "cable1", "master", "switch1", "up")
        for number, (name, side) in enumerate(zip(self.names, sides, strict=True)):
            self._plug(f"port{number}", side, "eth0", name)
            _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def _plug(self, port: str, side: int, end: str, where: str) -> None:
        """Lead a cable from a switch to somewhere."""
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", end, "netns", where)
        _ip("-n", self._switch, "link", "set", port, "master", f"switch{side}", "up")

    def address(self, number: int) -> str:
        """Return the address of a host."""
        return f"10.77.0.{number + 1}"

    def part(self) -> None:
        """Let nothing pass between the two switches; nobody is told."""
        _ip("-n", self._switch, "link", "set", "cable0", "down")

    def join(self) -> None:
        """Let all pass again."""
        _ip("-n", self._switch, "link", "set", "cable0", "up")

    def close(self) -> None:
        """Take all away."""
        for name in (self._switch, *self.names):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


@contextlib.contextmanager
def hosts(*sides: int) -> Iterator[Hosts]:
    """Have a host at each of these switches."""
    made = Hosts(sides)
    try:
        yield made
    finally:
        made.close()
