"""What happens with others and with us when something goes wrong: torch with Gloo, Open MPI, MPICH, and oneaccord, in worlds of three ranks over TCP.

Each cell of the table is measured: three processes make calls, something is done to rank 1 or by it, and each process tells how its call ended. Nobody is given
a timeout, so that each does what it does by itself; what still runs after ``--patience`` seconds hangs, and is killed. Bytes are changed on the path by a small
library in front of libc, which changes one byte of a large message of rank 1; it needs a C compiler.

Usage: PYTHONPATH=tests python tests/campaigns/campaign_peers.py [--peers gloo,openmpi] [--faults kill,dtype] [--patience 60] [--json FILE]

Python with torch and Open MPI is ``.venv-peers``, that with MPICH ``.venv-peers-mpich``; `make test-peers-faults` makes both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from campaigns.flooder import listening_ports
from support.worlds import free_port

__all__ = ["FAULTS", "PEERS", "cell"]

_ROOT: Final = Path(__file__).parents[2]
_RANKS: Final = 3
_VICTIM: Final = 1
_STOPPED_S: Final = 20.0
_READY_S: Final = 90.0

FAULTS: Final = {
    "kill": "rank 1 is killed",
    "stop": f"rank 1 is stopped for {_STOPPED_S:g} s",
    "dtype": "all_reduce: float32 on rank 1, float64 elsewhere",
    "shape": "all_reduce: 2,000 elements on rank 1, 1,000 elsewhere",
    "op": "all_reduce: max on rank 1, sum elsewhere",
    "root": "broadcast: root 1 on rank 1, 0 elsewhere",
    "order": "rank 1 broadcasts and then reduces, the others the other way round",
    "stranger": "a stranger sends rubbish to each open port",
    "bytes": "one byte of an array is changed on the path",
}

_ADAPTERS: Final = {
    "torch": """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, OPS = dist.get_rank(), {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
def all_reduce(x, op="sum"):
    x = torch.from_numpy(x.copy())
    dist.all_reduce(x, OPS[op])
    return x.numpy()
def broadcast(x, root):
    x = torch.from_numpy(x.copy())
    dist.broadcast(x, root)
    return x.numpy()
close = dist.destroy_process_group
""",
    "mpi": """
from mpi4py import MPI
world = MPI.COMM_WORLD
rank, OPS = world.rank, {"sum": MPI.SUM, "max": MPI.MAX}
def all_reduce(x, op="sum"):
    out = np.empty_like(x)
    world.Allreduce(x, out, OPS[op])
    return out
def broadcast(x, root):
    x = x.copy()
    world.Bcast(x, root)
    return x
close = MPI.Finalize
""",
    "oneaccord": """
import oneaccord as oa
group = oa.init("tcp")
rank = group.rank
def all_reduce(x, op="sum"):
    return group.all_reduce(x, op=op)
def broadcast(x, root):
    return group.broadcast(x, root)
close = group.close
""",
}

_PROGRAM: Final = """
import json, os, signal, sys, time
import numpy as np
fault, victim, folder = os.environ["FAULT"], int(os.environ["VICTIM"]), os.environ["FOLDER"]
#ADAPTER
def tell(what, **facts):
    with open(f"{folder}/told-{rank}", "a") as file:
        file.write(json.dumps({"what": what, "rank": rank, "pid": os.getpid(), "at": time.monotonic(), **facts}) + "\\n")

def ends(calls):
    try:
        results = calls()
    except BaseException as error:
        tell("raised", type=type(error).__name__, text=str(error)[:2000])
        raise  # as in any program; whoever ends by it is seen by the others, or is not
    tell("returned", right=all(bool(np.array_equal(got, expected)) for got, expected in results), got=[got.ravel()[:2].tolist() for got, _ in results[:3]])

size, is_victim = 3, rank == victim
x = np.full(1000, rank + 1.0)
total = np.full(1000, 6.0)
large = np.full(1 << 20, rank + 1.0)
NOTHING = np.empty(0)  # no result is right where the ranks do not want the same

def calls():
    if fault == "kill":
        while True:
            all_reduce(x)
            if is_victim:
                os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        if is_victim:
            tell("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
        return [(all_reduce(x), total) for _ in range(20)]
    if fault == "dtype":
        return [(all_reduce(x.astype(np.float32) if is_victim else x), NOTHING)]
    if fault == "shape":
        return [(all_reduce(np.full(2000, 2.0) if is_victim else x), NOTHING)]
    if fault == "op":
        return [(all_reduce(x, "max" if is_victim else "sum"), NOTHING)]
    if fault == "root":
        return [(broadcast(x, victim if is_victim else 0), NOTHING)]
    if fault == "order":
        first, second = (lambda: broadcast(x, 0)), (lambda: all_reduce(x))
        return [(each(), NOTHING) for each in ((first, second) if is_victim else (second, first))]
    if fault == "stranger":
        return [(all_reduce(x), total) for _ in range(20)]
    return [(all_reduce(large), np.full(1 << 20, 6.0)) for _ in range(3)]

for _ in range(3):
    all_reduce(x), all_reduce(large), broadcast(x, 0)
tell("ready")
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.01)
ends(calls)
ends(lambda: [] if close() is None else [])
tell("well")
"""

_CHANGER: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
enum { LARGE = 16384, AT = 5000 };
static int changed;
static int is_due(int fd, size_t length) {
    int domain = 0; socklen_t size = sizeof domain;
    const char *go = getenv("CHANGE_AFTER");
    return !changed && length >= LARGE && go && !access(go, F_OK)
        && !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) && (domain == AF_INET || domain == AF_INET6);
}
static void *damaged(const void *data, size_t length) {
    char *copy = malloc(length);
    memcpy(copy, data, length);
    copy[AT + 6] ^= 0x10;  /* in the exponent or the high bits of a float64, wherever arrays are aligned */
    return copy;
}
static ssize_t noted(ssize_t sent, size_t before) {
    if (sent > (ssize_t)(before + AT + 6)) {
        char path[4096];
        changed = 1;
        snprintf(path, sizeof path, "%s.changed", getenv("CHANGE_AFTER"));
        close(open(path, O_CREAT | O_WRONLY, 0600));
    }
    return sent;
}
#define NEXT(function) __typeof__(&function) next = (__typeof__(&function))dlsym(RTLD_NEXT, #function)
ssize_t send(int fd, const void *data, size_t length, int flags) {
    NEXT(send);
    if (!is_due(fd, length)) return next(fd, data, length, flags);
    void *copy = damaged(data, length);
    ssize_t sent = noted(next(fd, copy, length, flags), 0);
    free(copy);
    return sent;
}
ssize_t write(int fd, const void *data, size_t length) {
    NEXT(write);
    if (!is_due(fd, length)) return next(fd, data, length);
    void *copy = damaged(data, length);
    ssize_t sent = noted(next(fd, copy, length), 0);
    free(copy);
    return sent;
}
static struct iovec *large_one(int fd, struct iovec *parts, const struct iovec *given, int count, size_t *before) {
    *before = 0;
    if (count > 64) return NULL;
    memcpy(parts, given, count * sizeof *parts);
    for (int number = 0; number < count; *before += parts[number++].iov_len)
        if (is_due(fd, parts[number].iov_len)) return parts + number;
    return NULL;
}
ssize_t writev(int fd, const struct iovec *given, int count) {
    NEXT(writev);
    struct iovec parts[64]; size_t before;
    struct iovec *large = large_one(fd, parts, given, count, &before);
    if (!large) return next(fd, given, count);
    large->iov_base = damaged(large->iov_base, large->iov_len);
    ssize_t sent = noted(next(fd, parts, count), before);
    free(large->iov_base);
    return sent;
}
ssize_t sendmsg(int fd, const struct msghdr *given, int flags) {
    NEXT(sendmsg);
    struct iovec parts[64]; size_t before;
    struct iovec *large = large_one(fd, parts, given->msg_iov, (int)given->msg_iovlen, &before);
    if (!large) return next(fd, given, flags);
    struct msghdr message = *given;
    message.msg_iov = parts;
    large->iov_base = damaged(large->iov_base, large->iov_len);
    ssize_t sent = noted(next(fd, &message, flags), before);
    free(large->iov_base);
    return sent;
}
"""


@dataclass(frozen=True)
class Peer:
    """One of those that are compared.

    Attributes
    ----------
    name
        As people know it.
    adapter
        The name of its adapter.
    environment
        The folder of its Python.
    mpiexec
        Its mpiexec with options, from its own folder; nothing where each rank is started by itself.
    variables
        Of its ranks.
    """

    name: str
    adapter: str
    environment: str
    mpiexec: Sequence[str] = ()
    variables: dict[str, str] = field(default_factory=dict)


PEERS: Final = {
    "gloo": Peer("torch, Gloo", "torch", ".venv-peers"),
    "openmpi": Peer(
        "Open MPI",
        "mpi",
        ".venv-peers",
        (
            "mpiexec",
            "--allow-run-as-root",
            "--oversubscribe",
            "--mca",
            "btl",
            "self,tcp",
            "--mca",
            "pml",
            "ob1",
            "--mca",
            "mpi_yield_when_idle",
            "1",
        ),
    ),
    "mpich": Peer(
        "MPICH",
        "mpi",
        ".venv-peers-mpich",
        ("mpiexec",),
        {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "MPIR_CVAR_NOLOCAL": "1"},
    ),
    "oneaccord": Peer("oneaccord", "oneaccord", ".venv"),
    "checksum": Peer("oneaccord, checksum", "oneaccord", ".venv", (), {"ONEACCORD_SECURITY__CHECKSUM": "true"}),
}


class _Job:
    """The three processes of one cell."""

    def __init__(self, peer: Peer, fault: str, folder: Path, python: Path, changer: Path | None) -> None:
        self._folder = folder
        program = folder / "program.py"
        program.write_text(_PROGRAM.replace("#ADAPTER", _ADAPTERS[peer.adapter]))
        foreign = ("ONEACCORD_", "SLURM_", "PMI", "OMPI_", "RANK", "WORLD_SIZE", "MASTER_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        clean |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **peer.variables}
        clean |= {"FAULT": fault, "VICTIM": str(_VICTIM), "FOLDER": str(folder)}
        clean |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ONEACCORD_SECRET": "the secret of the campaign"}
        run: list[str] = [str(python), str(program)]
        if changer is not None:
            clean |= {"CHANGE_AFTER": str(folder / "go")}
            preload = (
                f'[ "${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-$RANK}}}}" = {_VICTIM} ] && export LD_PRELOAD={changer}; exec "$@"'
            )
            run = ["sh", "-c", preload, "rank", *run]
        self._output = folder / "output"
        self.began = time.monotonic()
        with self._output.open("wb") as output:
            if peer.mpiexec:
                words = [str(python.parent / peer.mpiexec[0]), *peer.mpiexec[1:], "-n", str(_RANKS), *run]
                commands = [(words, clean)]
            else:
                commands = [(run, clean | {"RANK": str(rank), "WORLD_SIZE": str(_RANKS)}) for rank in range(_RANKS)]
            self._processes = [
                subprocess.Popen(words, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)
                for words, environ in commands
            ]  # fmt: skip

    def facts(self) -> list[dict[str, Any]]:
        """Return what the ranks have told."""
        paths = sorted(self._folder.glob("told-*"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.endswith("}")]

    def of(self, what: str) -> dict[int, dict[str, Any]]:
        """Return who told something, and with which facts."""
        return {fact["rank"]: fact for fact in reversed(self.facts()) if fact["what"] == what}

    def until(self, what: str, count: int, patience_s: float) -> bool:
        """Wait until so many ranks have told something."""
        until = time.monotonic() + patience_s
        while len(self.of(what)) < count and not self.is_over():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return len(self.of(what)) >= count

    def go(self) -> float:
        """Let the ranks make their calls."""
        (self._folder / "go").touch()
        return time.monotonic()

    def is_over(self) -> bool:
        """Tell whether all processes have ended."""
        return all(process.poll() is not None for process in self._processes)

    def pids(self) -> list[str]:
        """Return the processes of the job, with the launcher's own."""
        found, new = set(), [str(process.pid) for process in self._processes]
        while new:
            pid = new.pop()
            found.add(pid)
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    new += [child for child in path.read_text().split() if child not in found]
        return sorted(found)

    def codes(self) -> list[int | None]:
        """Return the exit codes of the processes that were started."""
        return [process.poll() for process in self._processes]

    def output(self) -> str:
        """Return what was written."""
        return self._output.read_text(errors="replace")

    def close(self) -> None:
        """Kill what still runs."""
        for pid in [fact["pid"] for fact in self.of("ready").values()] + self.pids():
            # Each was started by this campaign; whoever has ended is no more in this list, but for ranks, whose folder tells.
            with contextlib.suppress(OSError, ValueError):
                if (
                    str(self._folder).encode()
                    in Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
                ):
                    os.kill(int(pid), signal.SIGKILL)
        for process in self._processes:
            process.wait()


def _send_rubbish(job: _Job) -> tuple[int, list[socket.socket]]:
    """Say to each open port of a job what nobody of it would say, in four connections each; return how many ports there are, and what stays open."""
    ports = listening_ports(job.pids())
    chance = random.Random(1)
    rubbish = [b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(1 << 16), b"\xff" * 64, (16).to_bytes(8, "little") + bytes(4096)]
    kept = []
    for port in sorted(ports):
        for words in rubbish:
            with contextlib.suppress(OSError):
                stranger = socket.create_connection(("127.0.0.1", port), 2.0)
                kept.append(stranger)
                stranger.sendall(words)
    return len(ports), kept


def cell(peer: Peer, fault: str, python: Path, changer: Path | None, patience_s: float) -> dict[str, Any]:
    """Measure one cell; return what happened, in words and in full."""
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    job = _Job(peer, fault, folder, python, changer if fault == "bytes" else None)
    kept: list[socket.socket] = []
    more = ""
    try:
        if not job.until("ready", _RANKS, _READY_S):
            return {"words": "did not start", "output": job.output()[-3000:]}
        if fault == "stranger":
            count, kept = _send_rubbish(job)
            more = f" ({count} open ports)"
        started = job.go()
        if fault == "stop" and job.until("stopped", 1, patience_s):
            started = job.of("stopped")[_VICTIM]["at"]
            time.sleep(_STOPPED_S)
            with contextlib.suppress(OSError):
                os.kill(job.of("stopped")[_VICTIM]["pid"], signal.SIGCONT)
        until = time.monotonic() + patience_s
        while not job.is_over() and time.monotonic() < until:
            time.sleep(0.05)
        took = time.monotonic() - started
        if fault == "bytes" and not (folder / "go.changed").exists():
            more = " (no byte was changed)"
        words = _words(job, fault, started, took, patience_s)
        return {"words": words + more, "facts": job.facts(), "codes": job.codes(), "output": job.output()[-3000:]}
    finally:
        for stranger in kept:
            stranger.close()
        job.close()
        shutil.rmtree(folder, ignore_errors=True)


def _words(job: _Job, fault: str, started: float, took: float, patience_s: float) -> str:
    """Say what became of the ranks, those alike together."""
    returned, raised, well = job.of("returned"), job.of("raised"), job.of("well")
    told: dict[str, list[int]] = {}
    is_over, codes = job.is_over(), job.codes()
    for rank in range(_RANKS):
        if fault == "kill" and rank == _VICTIM:
            continue
        if rank in raised:
            names = "names rank 1" if _names(raised[rank]["text"]) else "names no rank"
            how = f"{raised[rank]['type']} after {_seconds(raised[rank]['at'] - started)}, {names}"
        elif rank in returned and (rank in well or not is_over):
            how = "right results" if returned[rank]["right"] else "a wrong result, silently"
            how += "" if rank in well else ", and then hangs as it closes"
        elif len(codes) == _RANKS and (codes[rank] or 0) < 0:
            how = f"aborted by {signal.Signals(-(codes[rank] or 0)).name}, no rank is named"
        elif is_over:
            how = f"ended with the job after {_seconds(took)}"
            how += ", a wrong result before" if rank in returned and not returned[rank]["right"] else ""
            how += ", the launcher names rank 1" if _names(job.output()) else ", no rank is named"
        else:
            how = f"hangs (killed after {patience_s:g} s)"
        told.setdefault(how, []).append(rank)
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {how}" for how, ranks in told.items())


def _names(text: str) -> bool:
    return bool(re.search(rf"\b(rank|process rank|proc|process|task)s?[ =#:]*(\[?){_VICTIM}\b", text, re.IGNORECASE))


def _seconds(took: float) -> str:
    return f"{took:.1f} s"


def _changer(folder: Path) -> Path | None:
    """Make the library that changes a byte; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    (folder / "changer.c").write_text(_CHANGER)
    made = folder / "changer.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(folder / "changer.c"), "-ldl"], check=True)
    return made


def main() -> int:
    """Measure the table, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--environments", type=Path, default=_ROOT, help="where the environments of the peers are")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    peers, faults = words.peers.split(","), words.faults.split(",")
    table: dict[str, dict[str, Any]] = {fault: {} for fault in faults}
    with tempfile.TemporaryDirectory(prefix="changer-") as folder:
        changer = _changer(Path(folder))
        for fault in faults:
            for name in peers:
                peer = PEERS[name]
                python = (
                    Path(sys.executable)
                    if peer.environment == ".venv"
                    else words.environments / peer.environment / "bin" / "python"
                )
                if not python.exists() or (fault == "bytes" and changer is None):
                    table[fault][name] = {"words": "not measured"}
                    continue
                table[fault][name] = cell(peer, fault, python, changer, words.patience)
                print(f"{fault:9} {name:10} {table[fault][name]['words']}", flush=True)
                if words.json:
                    words.json.write_text(json.dumps(table, indent=1))
    print("\n| | " + " | ".join(PEERS[name].name for name in peers) + " |\n|" + "---|" * (len(peers) + 1))
    for fault in faults:
        print(f"| {FAULTS[fault]} | " + " | ".join(table[fault][name]["words"] for name in peers) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
