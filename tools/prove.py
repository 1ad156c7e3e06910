"""Prove every algorithm that comes with oneaccord: all worlds, every root, every number of ranks per host, 1 to 3 segments.

`make test` proves most of this; the whole takes ten minutes on two cores. The first counterexample ends it.

Usage: python tools/prove.py [--worlds 33] [NAME_COLLECTIVE ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.proof.verify import ScheduleError, verify

SEGMENTS = (1, 2, 3)


def name_of(algorithm: Algorithm) -> str:
    """Return the name by which `oneaccord show` knows an algorithm."""
    return f"{algorithm.name}_{algorithm.collective.value}"


def prove(task: tuple[int, int]) -> tuple[int, int]:
    """Prove an algorithm, given by its position, in one world; return the position and the number of proofs."""
    position, size = task
    algorithm = BUILTIN[position]
    promise = PROMISES[algorithm.collective]
    roots = range(size) if promise.input_on_root or promise.output_on_root else range(1)
    hosts = [count for count in range(1, size + 1) if size % count == 0] if algorithm.by_host else [1]
    proved = 0
    for ranks_per_host in hosts:
        for root in roots:
            known = []
            for segments in SEGMENTS:
                schedules = [algorithm.schedule(rank, size, root, segments, ranks_per_host) for rank in range(size)]
                if schedules in known:
                    continue
                known.append(schedules)
                try:
                    verify(schedules, ordered=algorithm.ordered, canonical=algorithm.canonical)
                except ScheduleError as error:
                    error.add_note(
                        f"{name_of(algorithm)}: {size} ranks, root {root}, {segments} segments, {ranks_per_host} ranks per host"
                    )
                    raise
                proved += 1
    return position, proved


def main() -> None:
    """Prove what the command line names, or everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=33, help="the largest world")
    parser.add_argument("names", nargs="*", help="algorithms, such as ring_all_reduce; all by default")
    arguments = parser.parse_args()
    known = {name_of(algorithm): position for position, algorithm in enumerate(BUILTIN)}
    for name in arguments.names:
        if name not in known:
            parser.error(f"there is no algorithm {name!r}; known are {', '.join(known)}")
    chosen = [known[name] for name in arguments.names or known]
    tasks = [(position, size) for position in chosen for size in range(arguments.worlds, 0, -1)]
    counts = dict.fromkeys(chosen, 0)
    began = time.monotonic()
    with multiprocessing.Pool() as pool:
        for position, proved in pool.imap_unordered(prove, tasks):
            counts[position] += proved
    for position, proved in counts.items():
        print(f"{name_of(BUILTIN[position]):40} {proved:6} proofs")
    seconds = time.monotonic() - began
    print(f"{sum(counts.values())} proofs, worlds 1 to {arguments.worlds}, no counterexample, {seconds:.0f} s")


if __name__ == "__main__":
    main()
