"""Use groups for a long time, while ranks die and others come: memory, descriptors and threads of every process must stay as they are.

In each round the ranks make calls of all kinds, divide the group and close the parts, and wait for calls in the background; every result is checked. Every few
seconds the first or the last process dies; `oneaccord run` starts another one in its place, and `elastic` goes on with it. The other ranks, the launcher and the
process from which ranks are forked live through all of it. Every second each of these tells what it holds. What it holds in the last quarter of the time must
be no more than in the second quarter: memory of its own in the middle of all samples, but for one MiB or one part in fifty; descriptors, threads and shared memory at all. The first quarter is left out, in
which kinds of calls are met for the first time.

Before that time begins, the first process dies once, and the last one once. A first death costs memory that stays: code is loaded to recover from it. And the
death of rank 0 makes another rank the heir of the store, which holds connections to all the others from then on.

Usage: PYTHONPATH=tests python tests/campaigns/campaign_soak.py [--minutes 60] [--backends tcp,shm,hybrid] [--ranks 4] [--seed 0] [--death-every SECONDS]

The time is shared by the backends. With ``--death-every 0`` nobody dies.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

from campaigns.campaign_faults import BACKENDS, STEP, config_of, nursery_of
from support.fault_tools import LaunchedRanks, Nursery

__all__ = ["growth", "soak"]

_MIB: Final = 1 << 20
_QUARTERS: Final = 4
_SLACK_S: Final = 60.0
_SHORT_S: Final = 60.0
"""Kinds of calls are still met for the first time for so long."""
_RESTARTS: Final = 1_000_000

PROGRAM = (
    """
import ctypes, gc, random, signal
libc = ctypes.CDLL(None)
faulthandler.cancel_dump_traceback_later()
case = json.loads(os.environ["CASE"])
"""
    + STEP
    + '''
told = 0.0

def tell_what_is_held(after, steps):
    """Tell what this process holds, but for garbage: bytes in memory of its own and in shared memory, descriptors, threads."""
    global told
    if time.monotonic() - told < case["every_s"]:
        return
    told = time.monotonic()
    gc.collect()
    libc.malloc_trim(0)
    with open("/proc/self/statm") as file:  # what is shared, too, counts as far as it has been touched, which chance decides
        resident, touched = (int(pages) * os.sysconf("SC_PAGESIZE") for pages in file.read().split()[1:3])
    with open("/proc/self/maps") as file:
        mapped = [line.split()[0].split("-") for line in file if line.split()[1].endswith("s")]
    shared = sum(int(end, 16) - int(start, 16) for start, end in mapped)
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    tell("held", after=after, memory=resident - touched, shared=shared, descriptors=descriptors, threads=threads, steps=steps)

@oa.elastic(state=lambda: {"step": 0, "deaths": 0, "begun": 0.0}, config=case["config"], timeout_s=60)
def use(group, generation, state):
    every_s, ends = case["death_every_s"], [0, world_size - 1]
    while True:
        choice = random.Random(case["seed"] + state["step"])
        for _ in range(50):
            one_step(group, state["step"] % 1000, choice)
            state["step"] += 1
        now = float(group.broadcast(np.array([time.monotonic()]), 0)[0])
        if not every_s or state["deaths"] >= len(ends):
            state["begun"] = state["begun"] or now
            after = now - state["begun"]
            tell_what_is_held(after, state["step"])
            if after >= case["seconds"]:
                return state["step"]
            dies, victim = every_s and after >= every_s * (state["deaths"] - 1), choice.choice(ends)
        else:
            dies, victim = True, ends[state["deaths"]]
        state["deaths"] += bool(dies)
        state.commit()
        if dies and rank == victim:
            tell("death")
            os.kill(os.getpid(), signal.SIGKILL)

tell("well", steps=use())
'''
)


def growth(samples: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Return by how much each thing has grown from the second quarter of the time to the last, of what a process told.

    Raises
    ------
    AssertionError
        There are no samples of one of the two.
    """
    quarters: list[list[dict[str, Any]]] = [[] for _ in range(_QUARTERS)]
    for sample in samples:
        if sample["after"] >= 0:
            quarters[min(int(_QUARTERS * sample["after"] / seconds), _QUARTERS - 1)].append(sample)
    assert all((quarters[1], quarters[-1])), f"a process told only {len(samples)} times what it holds"
    before, after = quarters[1], quarters[-1]
    # A sample may be taken while the ranks have one group, or two, or none: so the least of the end counts, and the most of the beginning.
    counted = {
        what: min(one[what] for one in after) - max(one[what] for one in before)
        for what in ("shared", "descriptors", "threads")
    }
    memory, later = (statistics.median(one["memory"] for one in quarter) for quarter in (before, after))
    allowed = max(_MIB if seconds > _SHORT_S else 4 * _MIB, memory / 50)
    return {**counted, "memory": later - memory, "memory_allowed": allowed}


def soak(
    nursery: Nursery, backend: str, seconds: float, world_size: int = 4, seed: int = 0, death_every_s: float = 5.0
) -> tuple[dict[str, dict[str, float]], collections.Counter[str]]:
    """Use a world for so long; return what has grown in each process that lived all the time, and how many steps and deaths there were.

    Raises
    ------
    AssertionError
        A process holds more than before, a result was wrong, or the job did not end well; the text says which.
    """
    told = {"seed": seed, "seconds": seconds, "every_s": min(1.0, seconds / 20), "config": config_of(backend)}
    told |= {"death_every_s": death_every_s}
    ranks = LaunchedRanks(nursery, PROGRAM, world_size, nursery.directory / f"soak-{backend}", {"CASE": json.dumps(told)})
    ranks.options = ("--max-restarts", str(_RESTARTS))
    ranks.start()
    held: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    try:
        _read_until_well(ranks, seconds, held)
        codes = ranks.wait()
        assert set(codes.values()) == {0}, f"exit codes {codes}: {ranks.output()[-3000:]}"
    finally:
        ranks.close()
    counts = collections.Counter(fact["what"] for fact in ranks.facts)
    assert counts["death"] > 2 or not death_every_s, "nobody died"
    counts["steps"] = max(fact["steps"] for fact in ranks.facts if fact["what"] == "well")
    lasting = set(range(world_size)) - ({0, world_size - 1} if death_every_s else set())
    told_by_ranks = [fact for fact in ranks.facts if fact["what"] == "held"]
    begun = min(fact["at"] - fact["after"] for fact in told_by_ranks)
    for sample in itertools.chain.from_iterable(held.values()):
        sample["after"] = sample["at"] - begun
    for fact in told_by_ranks:
        if fact["rank"] in lasting:
            held[f"rank {fact['rank']}"].append(fact)
    grown = {who: growth(samples, seconds) for who, samples in held.items()}
    for who, each in grown.items():
        assert each["descriptors"] <= 0, f"{who} over {backend} holds {each['descriptors']} descriptors more than before"
        assert each["threads"] <= 0, f"{who} over {backend} has {each['threads']} threads more than before"
        assert each["shared"] <= 0, f"{who} over {backend} holds {each['shared']:,} bytes of shared memory more than before"
        assert each["memory"] <= each["memory_allowed"], f"{who} over {backend} holds {each['memory']:,} bytes more than before"
    return grown, counts


def _read_until_well(ranks: LaunchedRanks, seconds: float, held: dict[str, list[dict[str, Any]]]) -> None:
    begun = told = time.monotonic()
    while sum(fact["what"] == "well" for fact in ranks.facts) < ranks.world_size:
        now = time.monotonic()
        assert now < begun + seconds + _SLACK_S, f"the ranks do not end; output: {ranks.output()[-3000:]}"
        wrong = [fact for fact in ranks.facts if fact["what"] == "wrong"]
        assert not wrong, f"wrong results: {wrong}"
        if now - told > min(1.0, seconds / 20):
            told = now
            with contextlib.suppress(OSError):  # it has just ended
                children = Path(f"/proc/{ranks.launcher}/task/{ranks.launcher}/children").read_text().split()
                for who, pid in (("the launcher", ranks.launcher), *((f"process {pid}", int(pid)) for pid in children)):
                    held[who].append(_held(pid) | {"at": now})
        ranks.read(0.5)


def _held(pid: int) -> dict[str, float]:
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    descriptors, threads = (len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task"))
    return {"memory": resident, "shared": 0, "descriptors": descriptors, "threads": threads}


def main() -> int:
    """Run the soak; return its exit code: 0 where nothing has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--death-every", type=float, default=5.0, help="seconds from one death to the next")
    words = parser.parse_args()
    backends = words.backends.split(",")
    seconds = 60 * words.minutes / len(backends)
    failed = False
    with nursery_of() as nursery:
        for backend in backends:
            try:
                grown, counts = soak(nursery, backend, seconds, words.ranks, words.seed, words.death_every)
            except AssertionError as error:
                failed = True
                print(
                    f"FAILED {backend}: {error}\nrun it alone: make soak SOAK_ARGS='--backends {backend} --minutes {seconds / 60:g}'",
                    flush=True,
                )
                continue
            print(
                f"{backend}: {seconds:.0f} s, {counts['steps']:,} steps of {words.ranks} ranks, {counts['death']} deaths",
                flush=True,
            )
            for who, each in grown.items():
                print(
                    f"  {who}: memory {each['memory'] / 1024:+.0f} KiB, descriptors {each['descriptors']:+.0f}, threads {each['threads']:+.0f}",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
