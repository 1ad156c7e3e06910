"""A campaign of faults on real processes: each case is made of a seed, and a seed is all that is needed to run it again.

What is done to one rank of a job, which checks every result: it is killed, stopped, or stopped and continued; it exits, raises, has no memory or no
room on its disk. What must hold of every case:

- no rank hangs: each ends, or raises, within a bound;
- no result is wrong;
- whoever raises names the rank to which it was done;
- where the others can go on, they do: in the same group, or after ``shrink()`` in one of those that are left;
- nothing is left behind: no process, no file in /dev/shm, no file in the folder for temporary ones, and nobody listens at the port.

Usage: PYTHONPATH=tests python tests/campaigns/campaign_faults.py [--cases N] [--seed FIRST] [--backends tcp,shm,hybrid,mpi] [--kinds ...] [--minutes M]

Where Open MPI or MPICH and mpi4py are installed, ``mpi`` is among the backends. A case that fails prints its seed, and the command that runs it alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from support.fault_tools import LaunchedRanks, Nursery, Ranks

__all__ = [
    "BACKENDS",
    "KINDS",
    "STEP",
    "Case",
    "Failed",
    "MpiRanks",
    "case_of",
    "config_of",
    "judge",
    "mpi_is_here",
    "nursery_of",
    "run_case",
]

KINDS: Final = {
    "kill": "is killed",
    "stop": "is stopped for good",
    "continue": "is stopped and goes on",
    "zombie": "is stopped, and goes on when all others have given up",
    "exit": "exits with an exit code",
    "vanish": "ends without a word",
    "raise": "raises",
    "memory": "has no memory",
    "disk": "has no room on its disk",
}
_WAYS: Final = {"before": "before a call", "during": "in a call", "splitting": "in a split"}
BACKENDS: Final = ("tcp", "shm", "hybrid")
_TIMEOUT_S = 2.0
_PAUSE_S = 0.3
"""How long a rank stands still that goes on: shorter than any timeout."""
_BOUND_S = _TIMEOUT_S + 4.0
"""How long after the fault the last rank may raise or end. Deaths are told within a second on a machine that is idle; here there are more ranks than processors."""

STEP = '''
SIZES = (1, 7, 300, 5_000, 70_000)

def wrong(what, got):
    tell("wrong", of=what, got=repr(got)[:500])
    os._exit(99)

def check(what, got, expected):
    if not np.array_equal(got, expected):
        wrong(what, got)

def one_step(group, step, choice):
    """Make a call that all ranks make alike, and check its result."""
    size, own = group.world_size, group.rank
    count, what, root = choice.choice(SIZES), choice.choice(CALLS), choice.randrange(1 << 20) % size
    ranks = np.arange(size)
    x = np.full(count, own + step, np.int64)
    total = int(ranks.sum()) + step * size
    if what == "all_reduce":
        check(what, group.all_reduce(x), np.full(count, total))
    elif what == "later":
        check(what, group.all_reduce_async(x).wait(), np.full(count, total))
    elif what == "broadcast":
        check(what, group.broadcast(x, root), np.full(count, root + step))
    elif what == "reduce":
        got = group.reduce(x, root=root)
        if own == root:
            check(what, got, np.full(count, total))
    elif what == "all_gather":
        check(what, group.all_gather(x), np.repeat(ranks + step, count))
    elif what == "reduce_scatter":
        check(what, group.reduce_scatter(np.full(count * size, own + step)), np.full(count, total))
    elif what == "all_to_all":
        got = group.all_to_all(np.repeat(ranks * 1000 + own, count))
        check(what, got, np.repeat(own * 1000 + ranks, count))
    elif what == "ring":
        got = group.sendrecv(x, (own + 1) % size, (own - 1) % size)
        check(what, got, np.full(count, (own - 1) % size + step))
    elif what == "objects":
        got = group.all_gather_object([own, step])
        if got != [[rank, step] for rank in range(size)]:
            wrong(what, got)
    elif what == "split":
        with group.split(own % 2, -own) as part:
            mates = [rank for rank in range(size) if rank % 2 == own % 2]
            check(what, part.all_reduce(np.array([own])), [sum(mates)])
    else:
        group.barrier()

CALLS = ["all_reduce"] * 4 + ["later", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "ring", "objects", "split", "barrier"]
'''
"""What makes a call of all ranks, whose result it checks; needs `choice`."""

PROGRAM = (
    """
import random, resource, signal
faulthandler.cancel_dump_traceback_later()
faulthandler.dump_traceback_later(45, exit=True)
case = json.loads(os.environ["CASE"])
choice = random.Random(case["seed"])
kind, victim, at, way, delay = case["kind"], case["victim"], case["step"], case["way"], case["delay_s"]
"""
    + STEP
    + '''
def full_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def no_memory():
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + case["room"], resource.getrlimit(resource.RLIMIT_AS)[1]))

def fault():
    """Do to this rank what the case says."""
    tell("fault")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind in ("stop", "continue", "zombie"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "vanish":
        os._exit(5)
    elif kind == "exit":
        sys.exit(5)
    elif kind == "raise":
        raise ValueError("the fault of the campaign")
    elif kind == "memory":
        no_memory()
    elif kind == "disk":
        full_disk()

def train(group):
    for step in range(case["steps"]):
        if rank == victim and step == at:
            if way == "during":
                threading.Timer(delay, fault).start()
            else:
                fault()
        if way == "splitting" and step == at:
            with group.split(group.rank % 2) as part:
                part.barrier()
        one_step(group, step, choice)

group, closing = oa.init(timeout_s=case["timeout_s"], config=case["config"]), False
try:
    group.barrier()
    tell("ready", pid=os.getpid())
    train(group)
    if way == "during" and kind not in ("continue", "memory", "disk"):
        while True:  # until the fault comes, and is heard of
            group.barrier()
    closing = True
    group.close()
    tell("well")
except (oa.CommError, oa.OutOfMemoryError, MemoryError, OSError) as error:
    if rank == victim and kind in ("memory", "disk"):
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tell("raised", type=type(error).__name__, text=str(error)[:1500], about=getattr(error, "peer", None), closing=closing)
    if not case["shrinks"] or rank == victim or closing:  # a group that could not be closed is closed all the same
        raise
    group = group.shrink(timeout_s=20)
    choice = random.Random(case["seed"] + 1)
    for step in range(4):
        one_step(group, step, choice)
    group.close()
    tell("went on", of=group.world_size)
'''
)


def config_of(backend: str) -> dict[str, Any]:
    """Return the configuration of a world: hybrid's ranks are on pretended hosts of two."""
    if backend == "hybrid":
        return {"backend": backend, "ranks_per_host": 2, "backends": {backend: {"routes": {"intra": "shm", "inter": "tcp"}}}}
    return {"backend": backend}


@dataclass(frozen=True)
class Case:
    """What is done in one case.

    Attributes
    ----------
    seed
        What it is made of.
    backend, world_size
        In which world.
    kind, victim, way, step, delay_s
        What is done to which rank: in which of its steps, before or in a call, and how many seconds after the call has begun.
    steps
        How many calls the ranks make.
    shrinks
        Whether the others go on in a group of their own.
    room
        Bytes of memory that the victim still has.
    records
        Whether flight recorders write.
    timeout_s
        How long a call may last.
    """

    seed: int
    backend: str
    world_size: int
    kind: str
    victim: int
    way: str
    step: int
    delay_s: float
    steps: int
    shrinks: bool
    room: int
    records: bool
    timeout_s: float

    @property
    def words(self) -> str:
        """The case in words."""
        where = f"rank {self.victim} of {self.world_size} over {self.backend} {KINDS[self.kind]} {_WAYS[self.way]} of step {self.step}"
        return where + (", and the others go on" if self.shrinks else "")

    def variables(self, directory: Path) -> dict[str, str]:
        """Return what the ranks are told."""
        config = config_of(self.backend) | {"rendezvous": {"timeout_s": 30.0}}
        if self.records:
            config["recorder"] = {"directory": str(directory / "records")}
        told = asdict(self) | {"config": config}
        return {"CASE": json.dumps(told), "TMPDIR": str(directory), "ONEACCORD_BACKEND": self.backend}


_DEATHS = frozenset({"kill", "exit", "vanish", "raise"})
_SILENT = frozenset({"stop", "zombie"})
_HARMLESS = frozenset({"continue"})


class Failed(AssertionError):
    """A case in which something did not hold."""


def case_of(seed: int, backends: Sequence[str] = BACKENDS, kinds: Sequence[str] = tuple(KINDS)) -> Case:
    """Return the case of a seed."""
    chance = random.Random(seed)
    backend, kind = chance.choice(list(backends)), chance.choice(list(kinds))
    world_size = chance.randint(2, 8)
    victim = chance.randrange(world_size)
    way = chance.choice(["before", "during", "during", "splitting"])
    if kind in ("exit", "raise", "memory", "disk") and way == "during":
        way = "before"  # only the thread of the program can do so
    shrinks = kind in _DEATHS and chance.random() < 0.6 and world_size > 2
    if backend == "mpi":
        shrinks = False
    steps = chance.randint(3, 12)
    step, delay_s = chance.randrange(steps), chance.choice([0.0, 0.0001, 0.001, 0.01])
    room = chance.choice([0, 1 << 16, 1 << 20, 1 << 23])
    records, timeout_s = chance.random() < 0.5, _TIMEOUT_S if kind in _SILENT else 15.0
    return Case(seed, backend, world_size, kind, victim, way, step, delay_s, steps, shrinks, room, records, timeout_s)


_RANK_OF_MPI = """
import os
for theirs, name in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE")):
    os.environ[name] = os.environ.get(f"OMPI_COMM_WORLD_{theirs}") or os.environ[f"PMI_{theirs}"]
"""


_MPI_END_S = 5.0
"""How long after mpiexec the last of its ranks may end."""


class MpiRanks(LaunchedRanks):
    """The processes of one job that `oneaccord run` starts by mpiexec."""

    options = ("--backend", "mpi")
    _before = _RANK_OF_MPI

    def pid(self, rank: int) -> int:
        """Return a rank's process id, which it has told."""
        return int(next(fact["pid"] for fact in self.facts if fact["what"] == "ready" and fact["rank"] == rank))

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal."""
        os.kill(self.pid(rank), number)
        return time.monotonic()

    def left(self) -> list[int]:
        """Return the ranks whose processes are still there when they have had time to end."""
        until = time.monotonic() + _MPI_END_S
        while (left := self._there()) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    def _there(self) -> list[int]:
        told = [fact for fact in self.facts if fact["what"] == "ready"]
        return [fact["rank"] for fact in told if Path(f"/proc/{fact['pid']}").exists()]


@contextlib.contextmanager
def _ranks_of(nursery: Nursery, case: Case, directory: Path) -> Iterator[Ranks]:
    variables: dict[str, str | None] = {"GO": None, **case.variables(directory)}
    if case.backend != "mpi":
        with nursery.ranks(PROGRAM, case.world_size, **variables) as ranks:
            yield ranks
        return
    mpi_ranks = MpiRanks(nursery, PROGRAM, case.world_size, directory / "job", variables)
    try:
        yield mpi_ranks
    finally:
        mpi_ranks.close()
        for path in directory.glob("job*"):
            path.unlink()


def run_case(nursery: Nursery, case: Case, bound_s: float = _BOUND_S) -> float:
    """Run a case, of which all must be told within ``bound_s``; return how many seconds it took.

    Raises
    ------
    Failed
        Something does not hold, in words.
    """
    started = time.monotonic()
    before = _shared_files()
    directory = Path(tempfile.mkdtemp(prefix="case-", dir=nursery.directory))
    problem = ""
    with _ranks_of(nursery, case, directory) as ranks:
        try:
            _play(ranks, case)
            judge_mpi(ranks, case) if isinstance(ranks, MpiRanks) else judge(ranks, case, bound_s)
        except AssertionError as error:
            problem = f"{error}\n{_last_words(ranks, case)}"
        port = ranks.port
    problem = problem or _left_behind(case, directory, before, port)
    shutil.rmtree(directory)
    if problem:
        raise Failed(problem)
    return time.monotonic() - started


def _play(ranks: Ranks, case: Case) -> None:
    """Start the ranks, do from outside what a rank cannot do to itself, and wait for the end of all."""
    ranks.start()
    others = [rank for rank in range(case.world_size) if rank != case.victim]
    if case.kind in ("stop", "continue", "zombie"):
        ranks.await_facts("fault", 1)
    if case.kind == "continue":
        time.sleep(_PAUSE_S)
        ranks.signal(case.victim, signal.SIGCONT)
    elif case.kind in _SILENT:
        if not isinstance(ranks, MpiRanks):
            _end_of(ranks, others)
        else:
            ranks.await_facts("raised", 1)
        ranks.signal(case.victim, signal.SIGCONT if case.kind == "zombie" else signal.SIGKILL)
    _end_of(ranks, range(case.world_size))


def _end_of(ranks: Ranks, which: Sequence[int]) -> None:
    ranks.wait(which, timeout_s=50)


def judge(ranks: Ranks, case: Case, bound_s: float = _BOUND_S) -> None:
    """Raise an `AssertionError` that says what does not hold."""
    facts = ranks.facts
    wrong = [fact for fact in facts if fact["what"] == "wrong"]
    assert not wrong, f"wrong results: {wrong}"
    others = [rank for rank in range(case.world_size) if rank != case.victim]
    raised = {fact["rank"]: fact for fact in facts if fact["what"] == "raised"}
    well = {fact["rank"] for fact in facts if fact["what"] == "well"}
    faults = [fact["at"] for fact in facts if fact["what"] == "fault"]
    assert faults, "the fault did not come"
    late = {
        rank: fact["at"] - faults[0]
        for rank, fact in raised.items()
        if rank != case.victim and fact["at"] - faults[0] > bound_s
    }
    assert not late, f"told only after so many seconds: {late}"
    if case.kind in _HARMLESS:
        assert well == set(range(case.world_size)), f"not all ended well: {sorted(well)}"
        return
    if case.kind in ("memory", "disk") and not raised:
        assert well == set(range(case.world_size)), f"not all ended well, and none raised: {sorted(well)}"
        return
    # Who was through with its last step before the fault need not hear of it.
    silent = [rank for rank in others if rank not in raised and rank not in well]
    assert not silent, f"neither raised nor ended well: ranks {silent}"
    assert raised.keys() & set(others) or case.kind in ("memory", "disk"), "nobody heard of it"
    for rank in others:
        if rank in raised:
            assert raised[rank]["about"] == case.victim, (
                f"rank {rank} names rank {raised[rank]['about']}, and it was rank {case.victim}"
            )
    if case.kind == "zombie":
        assert case.victim in raised or ranks.codes[case.victim] != 0, "the one that came back ended as if all were well"
    if case.shrinks:
        went_on = {fact["rank"]: fact["of"] for fact in facts if fact["what"] == "went on"}
        left = sorted(rank for rank, fact in raised.items() if rank != case.victim and not fact["closing"])
        expected = dict.fromkeys(left, len(left))
        assert went_on == expected, f"went on: {went_on}, and should: {expected}"


def judge_mpi(ranks: Ranks, case: Case) -> None:
    """Raise an `AssertionError` that says what does not hold of a job that MPI ends where one of its ranks dies."""
    assert isinstance(ranks, MpiRanks)
    wrong = [fact for fact in ranks.facts if fact["what"] == "wrong"]
    assert not wrong, f"wrong results: {wrong}"
    well = {fact["rank"] for fact in ranks.facts if fact["what"] == "well"}
    assert any(fact["what"] == "fault" for fact in ranks.facts), "the fault did not come"
    if case.kind not in ("memory", "disk", *_HARMLESS):
        assert ranks.codes[0] != 0, "the job ended as if all were well"
    elif case.kind in _HARMLESS or ranks.codes[0] == 0:
        assert well == set(range(case.world_size)), f"not all ended well: {sorted(well)}"
    for fact in ranks.facts:
        if fact["what"] == "raised" and fact["rank"] != case.victim:
            assert fact["about"] == case.victim, (
                f"rank {fact['rank']} names rank {fact['about']}, and it was rank {case.victim}"
            )
    left = ranks.left()
    assert not left, f"processes of ranks {left} are left"


def _last_words(ranks: Ranks, case: Case) -> str:
    lines = [f"  rank {rank}: {ranks.output(rank)[-1500:]}" for rank in range(case.world_size)]
    told = [fact for fact in ranks.facts if fact["what"] != "ready"]
    return "\n".join(["told:", *(f"  {fact}" for fact in told), f"exit codes: {ranks.codes}", "written:", *lines])


def _left_behind(case: Case, directory: Path, before: set[str], port: int) -> str:
    """Return in words what a case has left on this host; processes have been waited for."""
    found = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file() and not _is_record(path)]
    if found:
        return f"files were left: {found}"
    if new := _shared_files() - before:
        return f"left in /dev/shm: {sorted(new)}"
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(("127.0.0.1", port))
        return f"somebody still listens at port {port}"
    return ""


def _is_record(path: Path) -> bool:
    return path.parent.name == "records" and path.suffix == ".json"


def _shared_files() -> set[str]:
    """Return the names that are this project's: other programs have theirs."""
    return {path.name for path in Path("/dev/shm").glob("*oneaccord*")}


def mpi_is_here() -> bool:
    return subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def nursery_of(directory: Path | None = None) -> Iterator[Nursery]:
    """Return where ranks come from."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        yield Nursery(Path(folder) if directory is None else directory)


def main() -> int:
    """Run the campaign; return its exit code: 0 where all cases hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--backends", default=",".join([*BACKENDS, *(["mpi"] if mpi_is_here() else [])]))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so long")
    words = parser.parse_args()
    backends, kinds = words.backends.split(","), words.kinds.split(",")
    until = time.monotonic() + 60 * words.minutes
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failed: list[int] = []
    started = time.monotonic()
    with nursery_of() as nursery:
        for seed in range(words.seed, words.seed + words.cases):
            if time.monotonic() > until:
                break
            case = case_of(seed, backends, kinds)
            try:
                run_case(nursery, case)
            except Failed as error:
                failed.append(seed)
                again = f"PYTHONPATH=tests python tests/campaigns/campaign_faults.py --cases 1 --seed {seed} --backends {words.backends} --kinds {words.kinds}"
                print(f"FAILED seed {seed}: {case.words}\n{error}\nrun it alone: {again}", flush=True)
            counts[case.backend, case.kind] += 1
    total = sum(counts.values())
    print(f"{total} cases in {time.monotonic() - started:.0f} s, {len(failed)} failed{f': seeds {failed}' if failed else ''}")
    for backend in backends:
        print(f"  {backend}: " + ", ".join(f"{kind} {counts[backend, kind]}" for kind in kinds))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
