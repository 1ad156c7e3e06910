"""What it costs to use oneaccord: time to import it, time from the launcher to the first all_reduce, and memory.

- import: NumPy, pluggy and pydantic alone; oneaccord with the tcp backend loaded.
- start: from the launcher's start until each of the ranks, two by default, has finished its first all_reduce; next to mpi4py and Gloo where they are found.
- memory: what is resident in a rank by then (VmRSS), next to NumPy and pydantic alone.

Each run is a fresh process; the kinds take turns, so that all see the same machine, and medians are compared. Peers are looked for
in virtual environments: an mpiexec with mpi4py, and torchrun.

Usage: python benchmarks/startup.py [-h] [--runs N] [--ranks N] [--peers DIR ...]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60

BASE = "import numpy, pluggy, pydantic; pydantic.BaseModel"
IMPORTS = {
    "numpy, pluggy, pydantic": BASE,
    # pydantic loads a good part of itself when the first model is made; whoever uses it at all makes one.
    "the same, with one model": f"{BASE}; type('Model', (pydantic.BaseModel,), {{'__annotations__': {{'x': int}}}})",
    "oneaccord + tcp": "import oneaccord; oneaccord.init; import oneaccord_tcp.plugin; from oneaccord.config.plugins import get_plugin_manager;"
    ' manager = get_plugin_manager(); manager.load_factory(manager.describe("tcp"))',
}
# Each rank writes when it was ready, and what it needs by then, to a file of its own: lines of several ranks may get mixed up.
END = """
import os, time
ready = time.time()
resident = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS"))
open(os.path.join(os.environ["STARTUP_DIR"], str(rank)), "w").write(f"{ready} {resident}")
"""
ALONE = f"{BASE}\nrank = 0{END}"
OURS = f"""
import numpy, oneaccord
with oneaccord.init() as group:
    group.all_reduce(numpy.ones(2, numpy.float32))
    rank = group.rank
{END.replace(chr(10), chr(10) + "    ")}
"""
MPI = f"""
import numpy
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
MPI.COMM_WORLD.Allreduce(numpy.ones(2, numpy.float32), numpy.empty(2, numpy.float32))
{END}"""
GLOO = f"""
import torch
import torch.distributed
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.distributed.all_reduce(torch.ones(2))
{END}
torch.distributed.destroy_process_group()
"""


@dataclass(frozen=True)
class Start:
    """A way to start ranks: its command, the program that they run, and variables to set."""

    name: str
    command: tuple[str, ...]
    program: str
    environ: Mapping[str, str]
    ranks: int


@dataclass(frozen=True)
class Found:
    """Of each run, the seconds until the last rank was ready, and the MiB resident in the largest."""

    seconds: list[float]
    mebibytes: list[float]


def ways(peers: list[Path], ranks: int) -> Iterator[Start]:
    """Return what there is to start: one process without anything, oneaccord, and all peers that are found."""
    yield Start("numpy, pluggy, pydantic", (sys.executable,), ALONE, {}, 1)
    # -P: as the console script, the launcher must not take the working directory for its own.
    run = (sys.executable, "-P", "-m", "oneaccord", "run", "-n", str(ranks))
    yield Start("oneaccord run, tcp", (*run, "--backend", "tcp"), OURS, {}, ranks)
    yield Start("oneaccord run, auto", run, OURS, {}, ranks)
    yield Start("oneaccord run --no-fork, tcp", (*run, "--no-fork", "--backend", "tcp"), OURS, {}, ranks)
    for directory in peers:
        python, mpiexec, torchrun = (directory.absolute() / "bin" / name for name in ("python", "mpiexec", "torchrun"))
        if mpiexec.exists() and _imports(str(python), "mpi4py"):
            yield from _mpi(str(python), str(mpiexec), ranks)
        if torchrun.exists():
            command = (str(torchrun), "--standalone", f"--nproc-per-node={ranks}")
            yield Start("torchrun, Gloo", command, GLOO, {"OMP_NUM_THREADS": "1"}, ranks)


def _mpi(python: str, mpiexec: str, ranks: int) -> Iterator[Start]:
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        yield Start("mpiexec, MPICH", (mpiexec, "-n", str(ranks), python), MPI, {}, ranks)
        return
    environ = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MPI4PY_MPIABI": "openmpi",
    }
    program = ("--oversubscribe", "-n", str(ranks), python)
    yield Start("mpiexec, Open MPI", (mpiexec, *program), MPI, environ, ranks)
    tcp = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self")
    yield Start("mpiexec, Open MPI over tcp", (mpiexec, *tcp, *program), MPI, environ, ranks)


def _imports(python: str, module: str) -> bool:
    found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", found], capture_output=True, check=False).returncode == 0


def first_all_reduce(way: Start, environ: Mapping[str, str]) -> tuple[float, float] | str:
    """Return the seconds until all ranks were ready and the MiB of the largest, or what went wrong."""
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "program.py")
        program.write_text(way.program)
        variables = {**environ, **way.environ, "STARTUP_DIR": directory}
        begun = time.time()
        try:
            done = subprocess.run(
                [*way.command, str(program)], env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not done within {LIMIT_S} s"
        written = [path.read_text().split() for path in Path(directory).iterdir() if path != program]
        if done.returncode or len(written) != way.ranks:
            return ((done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return max(float(ready) for ready, _ in written) - begun, max(int(kib) for _, kib in written) / 1024


def import_time(statement: str, environ: Mapping[str, str]) -> float:
    """Return the seconds that a statement takes in a fresh interpreter, the interpreter's own start left out."""
    program = f"from time import perf_counter as now; start = now(); {statement}; print(now() - start)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=dict(environ))
    return float(done.stdout)


def take_turns(starts: list[Start], runs: int) -> tuple[dict[str, list[float]], dict[str, Found], dict[str, str]]:
    """Return what was measured: the imports, the starts, and the starts that failed with the reason."""
    imports: dict[str, list[float]] = {name: [] for name in IMPORTS}
    found = {way.name: Found([], []) for way in starts}
    failed: dict[str, str] = {}
    # Compiled files as users have them after the first import, also where the environment forbids to write them.
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "STARTUP_DIR")}
    with tempfile.TemporaryDirectory() as compiled:
        environ["PYTHONPYCACHEPREFIX"] = compiled
        for run in range(-1, runs):  # the first turn only fills the caches
            for name, statement in IMPORTS.items():
                seconds = import_time(statement, environ)
                imports[name] += [seconds] if run >= 0 else []
            for way in starts:
                result = failed.get(way.name) or first_all_reduce(way, environ)
                if isinstance(result, str):
                    failed[way.name] = result
                elif run >= 0:
                    found[way.name].seconds.append(result[0])
                    found[way.name].mebibytes.append(result[1])
    return imports, {name: one for name, one in found.items() if name not in failed}, failed


def table(title: str, rows: Mapping[str, list[float]], unit: str) -> None:
    """Print the median and the extremes of each kind."""
    print(f"\n{title:<30}{'median':>9}{'least':>9}{'most':>9}")
    for name, values in rows.items():
        print(
            f"{name:<30}" + "".join(f"{value:>9.1f}" for value in (statistics.median(values), min(values), max(values))), unit
        )


def ratio(rows: Mapping[str, list[float]], ours: str, other: str, aim: float) -> None:
    """Print in what ratio two medians stand, and whether that is what was aimed at."""
    if ours in rows and other in rows:
        found = statistics.median(rows[ours]) / statistics.median(rows[other])
        print(f"  {ours} : {other} = {found:.2f} (aim: {aim}{'' if found <= aim else ', missed'})")


def main() -> None:
    """Measure, and print three tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="how often each kind is started (default: 15)")
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks each start has (default: 2)")
    parser.add_argument(
        "--peers",
        type=Path,
        nargs="*",
        default=sorted(ROOT.glob(".venv-peers*")),
        metavar="DIR",
        help="virtual environments with mpi4py and an MPI, or with torch (default: those named .venv-peers*)",
    )
    arguments = parser.parse_args()
    starts = list(ways(arguments.peers, arguments.ranks))
    imports, found, failed = take_turns(starts, arguments.runs)
    print(f"{arguments.runs} runs each, taking turns; ratios are those of medians")
    base = "numpy, pluggy, pydantic"
    ours = [name for name in found if name.startswith("oneaccord")]
    in_ms = {name: [value * 1e3 for value in values] for name, values in imports.items()}
    table("import", in_ms, "ms")
    for other in list(IMPORTS)[:2]:
        ratio(in_ms, "oneaccord + tcp", other, 1.5)
    starts_ms = {name: [value * 1e3 for value in one.seconds] for name, one in found.items() if name != base}
    table("start to first all_reduce", starts_ms, "ms")
    for name, other in itertools.product(ours, starts_ms):
        if other not in ours:
            ratio(starts_ms, name, other, 0.5 if other == "torchrun, Gloo" else 1.5)
    memory = {name: one.mebibytes for name, one in found.items()}
    table("memory per rank", memory, "MiB")
    for name in ours:
        ratio(memory, name, base, 1.5)
    absent = [what for what in ("mpiexec", "torchrun") if not any(way.name.startswith(what) for way in starts)]
    if absent:
        print(f"\nnot found: {', '.join(absent)}; name virtual environments that have them with --peers")
    for name, reason in failed.items():
        print(f"\n{name}: failed: {reason}")


if __name__ == "__main__":
    main()
