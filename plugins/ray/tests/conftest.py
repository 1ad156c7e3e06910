"""A Ray cluster of two nodes on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ADDRESS = "127.0.0.5"
SECOND = "127.0.0.6"
_START_S = 120


class Cluster:
    """Two nodes with two processors each.

    Parameters
    ----------
    folder
        For what Ray leaves behind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 6399
        common = ["--num-cpus=2", "--disable-usage-stats", "--object-store-memory=200000000"]
        self._start(
            "--head",
            f"--node-ip-address={ADDRESS}",
            f"--port={self.port}",
            "--include-dashboard=false",
            f"--temp-dir={folder}",
            *common,
        )
        self._start(f"--address={self.address}", f"--node-ip-address={SECOND}", *common)

    @property
    def address(self) -> str:
        return f"{ADDRESS}:{self.port}"

    def _start(self, *words: str) -> None:
        subprocess.run(
            [str(Path(sys.executable).parent / "ray"), "start", *words],
            check=True,
            timeout=_START_S,
            capture_output=True,
            env=environment(),
        )

    def processes(self, *marks: str) -> list[int]:
        """Return the processes of this cluster whose command lines hold all of some words."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(self.folder) in words and all(mark in words for mark in marks):
                    found.append(int(each.name))
        return found

    def stop(self) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def environment() -> dict[str, str]:
    return {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster, to which this process is connected."""
    import tempfile

    os.environ.update(environment())
    with tempfile.TemporaryDirectory(prefix="mhray", dir="/tmp") as folder:  # sockets need short paths
        started = Cluster(Path(folder))
        import ray

        try:
            ray.init(address=started.address, _node_ip_address=ADDRESS)
            yield started
            ray.shutdown()
        finally:
            started.stop()
