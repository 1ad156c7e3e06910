"""Which network devices UCX may use: UCX listens on every one of them."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from ipaddress import ip_address
from pathlib import Path

from oneaccord.api import ConfigError
from oneaccord_ucx.finding import adapters

__all__ = ["devices_for"]

_SIOCGIFADDR = 0x8915


def devices_for(host: str) -> list[str]:
    """Return the interface that has the address ``host``, and the ports of InfiniBand and RoCE if it is more than loopback.

    Raises
    ------
    ConfigError
        No interface has it.
    """
    address = ip_address(host.partition("%")[0])
    for _, name in socket.if_nameindex():
        if address in _addresses(name) or (address.is_loopback and name == "lo"):
            return [name, *([] if address.is_loopback else adapters())]
    raise ConfigError(
        f"no network interface of this host has the address {host}, by which this rank reaches the others: name one in "
        'backends.ucx.devices, such as ["eth0"]',
        key="backends.ucx.devices",
        value=[],
    )


def _addresses(interface: str) -> list[object]:
    found: list[object] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(ip_address(answer[20:24]))
    with contextlib.suppress(OSError), Path("/proc/net/if_inet6").open(encoding="ascii") as table:
        found += [ip_address(bytes.fromhex(line.split()[0])) for line in table if line.split()[-1] == interface]
    return found
