"""Use groups for a long time: memory, descriptors and threads of every rank must stay as they are.

In each round the ranks make calls of all kinds, divide the group and close the parts, and wait for calls in the background; every result is checked. Every
second each rank tells what it holds. What it holds in the last quarter of the time must be no more than in the second quarter, in the middle of all samples: descriptors
and threads exactly, memory but for one MiB or one part in fifty. The first quarter is left out, in which kinds of calls are met for the first time.

Usage: python tests/campaign_soak.py [--minutes 60] [--backends tcp,shm,hybrid] [--ranks 4] [--seed 0]

The time is shared by the backends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any, Final

from campaign_faults import BACKENDS, STEP, config_of, nursery_of
from fault_tools import Nursery, Ranks

__all__ = ["growth", "soak"]

_MIB: Final = 1 << 20
_QUARTERS: Final = 4
_SLACK_S: Final = 60.0

PROGRAM = (
    """
import ctypes, gc, random
libc = ctypes.CDLL(None)
faulthandler.cancel_dump_traceback_later()
case = json.loads(os.environ["CASE"])
choice = random.Random(case["seed"])
"""
    + STEP
    + '''
def held():
    """Return what this process holds, but for garbage: bytes in memory, descriptors, threads."""
    gc.collect()
    libc.malloc_trim(0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

group = mh.init(timeout_s=60, config=case["config"])
begun = told = time.monotonic()
step, goes_on = 0, True
while goes_on:
    for _ in range(50):
        one_step(group, step % 1000, choice)
        step += 1
    now = time.monotonic()
    if now - told >= case["every_s"]:
        told = now
        memory, descriptors, threads = held()
        tell("held", after=now - begun, memory=memory, descriptors=descriptors, threads=threads, steps=step)
    goes_on = bool(group.broadcast(np.array([now - begun < case["seconds"]]), 0)[0])
group.close()
tell("well", steps=step)
'''
)


def growth(samples: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Return by how much each thing has grown from the second quarter of the time to the last, of what a rank told.

    Raises
    ------
    AssertionError
        There are no samples of one of the two.
    """
    quarters: list[list[dict[str, Any]]] = [[] for _ in range(_QUARTERS)]
    for sample in samples:
        quarters[min(int(_QUARTERS * sample["after"] / seconds), _QUARTERS - 1)].append(sample)
    assert all((quarters[1], quarters[-1])), f"a rank told only {len(samples)} times what it holds"
    kinds = ("memory", "descriptors", "threads")
    before, after = (
        {what: statistics.median(one[what] for one in quarter) for what in kinds} for quarter in (quarters[1], quarters[-1])
    )
    return {**{what: after[what] - before[what] for what in kinds}, "memory_allowed": max(_MIB, before["memory"] / 50)}


def soak(nursery: Nursery, backend: str, seconds: float, world_size: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """Use a world for so long; return what its ranks told that they hold.

    Raises
    ------
    AssertionError
        A rank holds more than before, a result was wrong, or a rank did not end well; the text says which.
    """
    told = {"seed": seed, "seconds": seconds, "every_s": min(1.0, seconds / 20), "config": config_of(backend)}
    with nursery.ranks(PROGRAM, world_size, CASE=json.dumps(told), MANYHANDS_BACKEND=backend) as ranks:
        ranks.start()
        until = time.monotonic() + seconds + _SLACK_S
        _read_until_well(ranks, until)
        codes = ranks.wait()
        assert set(codes.values()) == {0}, f"exit codes {codes}: {ranks.output()[-3000:]}"
    samples = [fact for fact in ranks.facts if fact["what"] == "held"]
    for rank in range(world_size):
        grown = growth([sample for sample in samples if sample["rank"] == rank], seconds)
        assert grown["descriptors"] <= 0, (
            f"rank {rank} over {backend} holds {grown['descriptors']} descriptors more than before"
        )
        assert grown["threads"] <= 0, f"rank {rank} over {backend} has {grown['threads']} threads more than before"
        assert grown["memory"] <= grown["memory_allowed"], (
            f"rank {rank} over {backend} holds {grown['memory']:,} bytes more than before"
        )
    return samples


def _read_until_well(ranks: Ranks, until: float) -> None:
    while sum(fact["what"] == "well" for fact in ranks.facts) < ranks.world_size:
        assert time.monotonic() < until, f"the ranks do not end; output: {ranks.output()[-3000:]}"
        wrong = [fact for fact in ranks.facts if fact["what"] == "wrong"]
        assert not wrong, f"wrong results: {wrong}"
        ranks.read(0.5)


def main() -> int:
    """Run the soak; return its exit code: 0 where nothing has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    backends = words.backends.split(",")
    seconds = 60 * words.minutes / len(backends)
    failed = False
    with nursery_of() as nursery:
        for backend in backends:
            try:
                samples = soak(nursery, backend, seconds, words.ranks, words.seed)
            except AssertionError as error:
                failed = True
                print(
                    f"FAILED {backend}: {error}\nrun it alone: make soak SOAK_ARGS='--backends {backend} --minutes {seconds / 60:g}'",
                    flush=True,
                )
                continue
            grown = [growth([each for each in samples if each["rank"] == rank], seconds) for rank in range(words.ranks)]
            steps = max(each["steps"] for each in samples)
            print(
                f"{backend}: {seconds:.0f} s, {steps:,} steps of {words.ranks} ranks; from the second quarter to the last: memory "
                f"{max(each['memory'] for each in grown) / 1024:+.0f} KiB, descriptors {max(each['descriptors'] for each in grown):+.0f}, threads "
                f"{max(each['threads'] for each in grown):+.0f}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
