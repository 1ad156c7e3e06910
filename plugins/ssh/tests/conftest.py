"""Two ssh servers of the tests' own on this host, each at an address of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_ADDRESSES = ("127.0.0.21", "127.0.0.22")
_READY_S = 60.0
_SERVER = """
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
PidFile {folder}/{address}.pid
AuthorizedKeysFile {folder}/id.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PrintMotd no
"""
_CLIENT = """
Host host1
  HostName {one}
Host host2
  HostName {two}
Host *
  Port {port}
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
"""


@dataclass(frozen=True)
class Servers:
    """Two hosts, ``host1`` and ``host2`` for ssh's configuration file ``config``."""

    folder: Path
    config: str
    port: int


def _free_port() -> int:
    """Return a port that is free at both addresses; another program may still take it, and then a server says so."""
    with socket.socket() as first, socket.socket() as second:
        first.bind((_ADDRESSES[0], 0))
        port: int = first.getsockname()[1]
        second.bind((_ADDRESSES[1], port))
        return port


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start the two servers, with keys of their own, and end them."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if sshd is None:
        pytest.skip("there is no sshd: install Debian's package openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd as root refuses to start without it
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host_key", "id"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = _free_port()
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    config = folder / "config"
    config.write_text(_CLIENT.format(one=_ADDRESSES[0], two=_ADDRESSES[1], port=port, folder=folder))
    processes = []
    try:
        with (folder / "known_hosts").open("w") as known:
            for address in _ADDRESSES:
                file = folder / f"{address}.conf"
                file.write_text(_SERVER.format(address=address, port=port, folder=folder))
                known.write(f"[{address}]:{port} {key}\n")
                processes.append(subprocess.Popen([sshd, "-D", "-f", str(file), "-E", str(folder / f"{address}.log")]))
        for address, process in zip(_ADDRESSES, processes, strict=True):
            _await(address, port, process, folder)
        yield Servers(folder, str(config), port)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _await(address: str, port: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    until = time.monotonic() + _READY_S
    while True:
        assert process.poll() is None, (folder / f"{address}.log").read_text()
        try:
            socket.create_connection((address, port), 1).close()
            return
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)
