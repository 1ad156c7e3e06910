"""How the start grows with the number of ranks on four hosts, from the launcher's start to the end of the first all_reduce of 8 bytes on all ranks.

The hosts are addresses of this machine, 127.0.0.5 to 127.0.0.8, each with an ssh server of the benchmark's own (Debian's openssh-server). All ranks
share the processors of one machine, so a figure says what the start costs in work, not how long it takes on hosts of its own.

- ssh: `oneaccord run --on ssh`, and `oneaccord.launch(on="ssh")`, which starts workers and then calls a function in them;
- local: `oneaccord run` without hosts, for what they add;
- mpiexec: Open MPI with mpi4py on this machine, which takes all its addresses for one host; torchrun: one agent for each address.

For each kind and size: seconds until the last rank is ready and until the command has ended, and of each rank the memory, the descriptors, the TCP
connections and the threads that it has by then. Kinds take turns; each run is fresh.

Usage: python benchmarks/start_on_hosts.py [-h] [--ranks N ...] [--runs N] [--kinds NAME ...] [--peers DIR ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADDRESSES = ("127.0.0.5", "127.0.0.6", "127.0.0.7", "127.0.0.8")
LIMIT_S = 240.0
KINDS = ("ssh", "ssh-auto", "launch", "local", "mpiexec", "torchrun")

# Each rank writes what it has to a file of its own, when it is ready.
END = """
def _end(rank):
    import os, socket, time
    ready = time.time()
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    smaps = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup").readlines()[1:])
    names, connected = os.listdir("/proc/self/fd"), 0
    for name in names:
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                connected += sock.family in (socket.AF_INET, socket.AF_INET6) and bool(sock.getpeername())
        except OSError:
            pass
    kib = int(status["VmRSS"].split()[0]), int(smaps["Pss"].split()[0])
    path = os.path.join(os.environ.get("START_DIR") or DIRECTORY, str(rank))
    open(path, "w").write(f"{ready} {kib[0]} {kib[1]} {len(names)} {connected} {int(status['Threads'])} {time.process_time()}")
"""
OURS = f"""
import numpy, oneaccord
DIRECTORY = {{directory!r}}
{END.replace("{", "{{").replace("}", "}}")}
with oneaccord.init() as group:
    group.all_reduce(numpy.ones(2, numpy.float32))
    _end(group.rank)
    group.barrier()  # so that nobody measures while others end
"""
LAUNCH = f"""
import numpy, oneaccord
DIRECTORY = {{directory!r}}
{END.replace("{", "{{").replace("}", "}}")}
def function(group):
    group.all_reduce(numpy.ones(2, numpy.float32))
    _end(group.rank)
    group.barrier()
oneaccord.launch(function, {{ranks}}, on="ssh", options={{options!r}})
"""
MPI = f"""
import numpy
from mpi4py import MPI
DIRECTORY = {{directory!r}}
{END.replace("{", "{{").replace("}", "}}")}
MPI.COMM_WORLD.Allreduce(numpy.ones(2, numpy.float32), numpy.empty(2, numpy.float32))
_end(MPI.COMM_WORLD.rank)
MPI.COMM_WORLD.Barrier()
"""
TORCH = f"""
import torch, torch.distributed
DIRECTORY = {{directory!r}}
{END.replace("{", "{{").replace("}", "}}")}
torch.distributed.init_process_group("gloo")
torch.distributed.all_reduce(torch.ones(2))
_end(torch.distributed.get_rank())
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@dataclass(frozen=True)
class Run:
    """One run: seconds to the last ready rank and to the end, and the largest figures of a rank, and those of rank 0."""

    kind: str
    ranks: int
    ready_s: float
    ended_s: float
    rss_mib: float
    pss_mib: float
    descriptors: int
    descriptors_of_rank_0: int
    connections: int
    connections_of_rank_0: int
    threads: int
    connections_per_host: int
    processor_s: float
    processor_s_of_rank_0: float


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Path]:
    """Run an ssh server at each address; yield the client's configuration."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if sshd is None:
        sys.exit("there is no sshd: install Debian's openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd as root refuses to start without it
    for name in ("host_key", "id"):
        subprocess.run(
            [shutil.which("ssh-keygen") or "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    with socket.socket() as free:
        free.bind((ADDRESSES[0], 0))
        port = free.getsockname()[1]
    config, known = folder / "config", folder / "known_hosts"
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    known.write_text("".join(f"[{address}]:{port} {key}\n" for address in ADDRESSES))
    config.write_text(
        f"Host *\n  Port {port}\n  IdentityFile {folder}/id\n  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n  LogLevel ERROR\n"
    )
    started = []
    try:
        for address in ADDRESSES:
            file = folder / f"{address}.conf"
            lines = (
                f"ListenAddress {address}",
                f"Port {port}",
                f"HostKey {folder}/host_key",
                "PidFile none",
                f"AuthorizedKeysFile {folder}/id.pub",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "PermitRootLogin prohibit-password",
                "StrictModes no",
                "UsePAM no",
                "PrintMotd no",
            )
            file.write_text("\n".join(lines) + "\n")
            started.append(subprocess.Popen([sshd, "-D", "-f", str(file), "-E", str(folder / f"{address}.log")]))
        until = time.monotonic() + 30
        for address in ADDRESSES:
            while True:
                try:
                    socket.create_connection((address, port), 1).close()
                    break
                except OSError:
                    if time.monotonic() > until:
                        sys.exit((folder / f"{address}.log").read_text())
                    time.sleep(0.02)
        yield config
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
            process.wait()


def used_hosts(ranks: int) -> Sequence[str]:
    """Return the hosts of a job: four, or as many as it has ranks."""
    return ADDRESSES[: min(len(ADDRESSES), ranks)]


def commands(kind: str, ranks: int, folder: Path, config: Path, peers: Sequence[Path]) -> list[list[str]]:
    """Return the commands of a start, which run at once; none if it cannot be made here."""
    hosts = used_hosts(ranks)
    each = ranks // len(hosts)
    named = [f"{host}:{each}" for host in hosts]
    program, directory = folder / "program.py", str(folder)
    ours = [sys.executable, "-P", "-m", "oneaccord", "run", "-n", str(ranks)]
    program.write_text(
        {"launch": LAUNCH, "mpiexec": MPI, "torchrun": TORCH}.get(kind, OURS).format(
            directory=directory, ranks=ranks, options={"hosts": named, "config_file": str(config)}
        )
    )
    if kind in ("ssh", "ssh-auto"):
        backend = ["--backend", "tcp"] if kind == "ssh" else []
        return [[*ours, *backend, "--on", "ssh", "--hosts", ",".join(named), "--option", f"config_file={config}", str(program)]]
    if kind == "local":
        return [[*ours, "--backend", "tcp", str(program)]]
    if kind == "launch":
        return [[sys.executable, "-P", str(program)]]
    tool = next((peer.absolute() / "bin" / kind for peer in peers if (peer / "bin" / kind).exists()), None)
    if tool is None:
        return []
    python = str(tool.parent / "python")
    if kind == "mpiexec":
        return [[str(tool), "--oversubscribe", "-n", str(ranks), python, str(program)]]
    with socket.socket() as free:
        free.bind((hosts[0], 0))
        port = free.getsockname()[1]
    common = [
        str(tool),
        f"--nnodes={len(hosts)}",
        f"--nproc-per-node={each}",
        f"--master-addr={hosts[0]}",
        f"--master-port={port}",
    ]
    return [[*common, f"--node-rank={number}", str(program)] for number in range(len(hosts))]


def measure(kind: str, ranks: int, config: Path, peers: Sequence[Path]) -> Run | str:
    """Start ranks once; return the figures, or what went wrong."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    environ |= {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MPI4PY_MPIABI": "openmpi",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = commands(kind, ranks, folder, config, peers)
        if not words:
            return "not installed"
        begun = time.time()
        with (folder / "said").open("w+") as said:
            started = [
                subprocess.Popen(
                    each, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=name, start_new_session=True
                )
                for each in words
            ]
            try:
                codes = [process.wait(max(0.1, begun + LIMIT_S - time.time())) for process in started]
            except subprocess.TimeoutExpired:
                codes = [1]
                said.write(f"\nnot done within {LIMIT_S:g} s")
            finally:
                for process in started:
                    if process.poll() is None:
                        process.terminate()
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(30)
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
        ended = time.time()
        found = {int(path.name): path.read_text().split() for path in folder.iterdir() if path.name.isdigit()}
        if any(codes) or len(found) != ranks:
            text = (folder / "said").read_text().strip()
            return f"{len(found)} of {ranks} ranks were ready; exit codes {codes}: {text[-1500:]}"
        ready, rss, pss, files, connected, threads, spent = zip(*(found[rank] for rank in range(ranks)), strict=True)
        connections = [int(each) for each in connected]
        share = ranks // len(used_hosts(ranks))
        return Run(
            kind,
            ranks,
            max(map(float, ready)) - begun,
            ended - begun,
            max(map(int, rss)) / 1024,
            statistics.median(map(int, pss)) / 1024,
            max(map(int, files)),
            int(files[0]),
            max(connections),
            connections[0],
            max(map(int, threads)),
            max(sum(connections[first : first + share]) for first in range(0, ranks, share)),
            sum(map(float, spent)),
            float(spent[0]),
        )


def main() -> None:
    """Measure, and print a line for each kind and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128, 256], metavar="N")
    parser.add_argument("--runs", type=int, default=3, help="how often each is started (default: 3)")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="NAME", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--peers", type=Path, nargs="*", default=sorted(ROOT.glob(".venv-peers*")), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run to a file, one line each")
    arguments = parser.parse_args()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as name, servers(Path(name)) as config:
        for ranks in arguments.ranks:
            for _ in range(arguments.runs):
                for kind in arguments.kinds:
                    found = measure(kind, ranks, config, arguments.peers)
                    if isinstance(found, str):
                        print(f"{kind}, {ranks} ranks: {found}", file=sys.stderr, flush=True)
                        continue
                    runs.append(found)
                    if arguments.json is not None:
                        with arguments.json.open("a") as file:
                            file.write(json.dumps(asdict(found)) + "\n")
            for kind in arguments.kinds:
                same = [each for each in runs if (each.kind, each.ranks) == (kind, ranks)]
                if same:
                    middle = {key: statistics.median(getattr(each, key) for each in same) for key in list(asdict(same[0]))[2:]}
                    print(
                        f"{kind:<9} {ranks:>4}  " + "  ".join(f"{key} {value:.4g}" for key, value in middle.items()), flush=True
                    )


if __name__ == "__main__":
    main()
