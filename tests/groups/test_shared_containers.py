"""Arrays of ranks in containers, which are namespaces here: what they can open decides, and not the names of their hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.fault_tools import SECRET
from support.worlds import held_port

NAME = "oneaccord-shared"


@cache
def has_namespaces() -> bool:
    """Return whether this process may make namespaces, as root may."""
    try:
        words = ["unshare", "--pid", "--fork", "--mount-proc", "mount", "-t", "tmpfs", "none", "/dev/shm"]
        return subprocess.run(words, check=False, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


needs_namespaces = pytest.mark.skipif(
    not has_namespaces(), reason="only root can make PID namespaces, and mount a small /dev/shm"
)

ALONE = "exec unshare --pid --fork --kill-child --mount-proc"
OWN_FOLDER = (
    'exec unshare --pid --fork --kill-child --mount-proc sh -c \'mount -t tmpfs -o size=4m none /dev/shm; exec "$0" "$@"\''
)
CONTAINED = """
import json, os, sys
import numpy as np
import oneaccord as oa

rank, size, port, nbytes = map(int, sys.argv[1:])
with oa.init(rank=rank, world_size=size, backend="tcp", config={"rendezvous": {"address": f"127.0.0.1:{port}"}}, timeout_s=30) as group:
    try:
        with group.shared(nbytes, "uint8") as shared:
            shared.array[rank] = rank + 1
            shared.fence()
            group.barrier()
            found = {"array": shared.array[:size].tolist(), "ranks": shared.group.ranks, "split": group.split_hosts().ranks}
            found["folder"] = [name for name in os.listdir("/dev/shm") if name.startswith("oneaccord")]
            if nbytes > 1000:
                try:
                    group.shared(nbytes, "uint8")
                except oa.OutOfMemoryError as error:
                    found["second"] = str(error)
                shared.array[...] = 1  # no page is missing
    except oa.OneAccordError as error:
        found = {"error": type(error).__name__, "text": str(error)}
    with open(f"found-{rank}", "w") as file:
        json.dump(found, file)
"""


def contained(folder: Path, starts: list[str], nbytes: int = 100, before: str = "") -> list[dict[str, Any]]:
    """Run one rank for each word that starts it, in a mount namespace with a /dev/shm of 4 MiB; return what each found, in order."""
    (folder / "rank.py").write_text(CONTAINED)
    with held_port() as port:
        address = port.getsockname()[1]
        commands = [
            f"({start} {sys.executable} {folder}/rank.py {rank} {len(starts)} {address} {nbytes}) &"
            for rank, start in enumerate(starts)
        ]
        script = "\n".join(["mount -t tmpfs -o size=4m none /dev/shm", before, *commands, "wait", "ls /dev/shm >&2"])
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("ONEACCORD_", "SLURM_"))}
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script],
            check=False,
            capture_output=True,
            text=True,
            timeout=100,
            cwd=folder,
            env={**environ, "ONEACCORD_SECRET": SECRET},
        )
    files = [folder / f"found-{rank}" for rank in range(len(starts))]
    assert all(file.exists() for file in files), done
    assert NAME not in done.stderr, "a name is left in /dev/shm"
    return [json.loads(file.read_text()) | {"said": done.stderr} for file in files]


@needs_namespaces
def test_containers_with_one_folder_share_by_it_and_leave_no_name(tmp_path: Path) -> None:
    stale = f"touch /dev/shm/{NAME}-0123"  # of processes that were killed
    for fact in contained(tmp_path, [ALONE] * 3, before=stale):
        assert (fact["array"], fact["ranks"], fact["split"], fact["folder"]) == ([1, 2, 3], [0, 1, 2], [0, 1, 2], [])


@needs_namespaces
def test_containers_with_folders_of_their_own_have_arrays_of_their_own(tmp_path: Path) -> None:
    found = contained(tmp_path, ["exec", "exec", OWN_FOLDER])
    assert [(fact["array"], fact["ranks"]) for fact in found] == [([1, 2, 0], [0, 1])] * 2 + [([0, 0, 3], [2])]
    assert "do not share memory with each other (here, no process" in found[0]["said"]
    assert "ranks 0-1; rank 2" in found[0]["said"]


@pytest.mark.long
@needs_namespaces
def test_one_memory_under_two_host_names_is_one_host(tmp_path: Path) -> None:
    renamed = 'exec unshare --uts sh -c \'hostname elsewhere; exec "$0" "$@"\''
    for fact in contained(tmp_path, ["exec", renamed]):
        assert (fact["array"], fact["ranks"]) == ([1, 2], [0, 1])


@pytest.mark.long
@needs_namespaces
def test_users_of_namespaces_of_their_own_share_memory(tmp_path: Path) -> None:
    for fact in contained(tmp_path, ["exec unshare --user --map-root-user"] * 2):
        assert (fact["array"], fact["ranks"]) == ([1, 2], [0, 1])


@needs_namespaces
def test_a_full_folder_is_told_with_what_is_free_and_what_to_do(tmp_path: Path) -> None:
    for fact in contained(tmp_path, [ALONE] * 2, nbytes=3 << 20):
        assert "3 MiB are needed, and of the 4 MiB of /dev/shm " in fact["second"]
        assert "are free: make it larger (docker run --shm-size; " in fact["second"]


@pytest.mark.long
@needs_namespaces
def test_a_full_folder_does_not_matter_within_one_namespace(tmp_path: Path) -> None:
    for fact in contained(tmp_path, ["exec"] * 2, nbytes=5 << 20):
        assert fact["ranks"] == [0, 1]
        assert "second" not in fact
