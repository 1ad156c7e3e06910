"""The address of a network interface."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

from oneaccord.api import ConfigError

__all__ = ["address_of"]

_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str:
    """Return the IPv4 address of ``interface``, its IPv6 address if it has no other.

    Raises
    ------
    ConfigError
        There is no such interface, or it has no address.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ConfigError(
            f"backends.tcp.interface is {interface!r}, but this host has no such interface: it has {', '.join(names)}",
            key="backends.tcp.interface",
            value=interface,
        )
    address = _ipv4(interface) or _ipv6(interface)
    if address is None:
        raise ConfigError(
            f"backends.tcp.interface is {interface!r}, which has no address on this host: choose another, or set backends.tcp.host",
            key="backends.tcp.interface",
            value=interface,
        )
    return address


def _ipv4(interface: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _ipv6(interface: str) -> str | None:
    with contextlib.suppress(OSError), Path("/proc/net/if_inet6").open(encoding="ascii") as table:
        for line in table:
            digits, *_, name = line.split()
            if name == interface and not digits.startswith("fe80"):
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None
