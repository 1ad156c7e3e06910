"""What a flood of strangers costs a job: each connects to every port at which a rank listens, 2,000 connections at a time.

A job meets, makes calls, divides its group, loses a rank (or, with ``--lose both``, that with the store and its successor) and shrinks, once alone
and once under each kind of flood (`flooder`). Each step is timed on every rank, and the slowest rank counts.

Usage: PYTHONPATH=tests python tests/campaigns/campaign_floods.py [--kinds idle,slow,wrong,replay] [--count 2000] [--repeat 3] [--ranks 4] [--lose last]
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from support.fault_tools import SECRET, Nursery

from oneaccord.net.handshake import knock

__all__ = ["KINDS", "measure"]

KINDS: Final = ("idle", "slow", "wrong", "replay")
_SPLITS: Final = 5
_CALLS: Final = 300

PROGRAM: Final = f"""
faulthandler.cancel_dump_traceback_later()
started = time.monotonic()
group = oa.init(timeout_s=120)
tell("step", name="meeting", took=time.monotonic() - started)
started = time.monotonic()
assert group.all_reduce(np.ones(1))[0] == world_size
tell("step", name="first call", took=time.monotonic() - started)
for _ in range({_SPLITS}):
    group.barrier()
    started = time.monotonic()
    part = group.split(rank % 2)
    part.barrier()
    tell("step", name="split and its first call", took=time.monotonic() - started)
    part.close()
group.barrier()
started = time.monotonic()
for _ in range({_CALLS}):
    group.all_reduce(np.ones(1 << 10))
tell("step", name="{_CALLS} calls", took=time.monotonic() - started)
tell("ready")
try:
    while True:
        group.all_reduce(np.ones(1))
except oa.PeerLostError:
    pass
started = time.monotonic()
group = group.shrink(timeout_s=120)
group.barrier()
tell("step", name="shrink and its first call", took=time.monotonic() - started)
group.close()
tell("well")
"""


@contextlib.contextmanager
def flooded(kind: str, count: int, port: int, pids: Path) -> Iterator[None]:
    """Have a flood at a job's ports."""
    command = [sys.executable, str(Path(__file__).with_name("flooder.py")), kind, str(count), str(port), str(pids)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(knock(SECRET.encode()).hex().encode())  # what a rank may have said before
            process.stdin.close()
            yield
        finally:
            process.kill()


def measure(
    nursery: Nursery, kind: str, count: int = 2000, world_size: int = 4, lost: Collection[int] = (3,)
) -> dict[str, float]:
    """Return how long each step of a job lasts under a flood, ``none`` for without, in seconds; of repeated steps the median.

    The ranks ``lost`` are killed, at once.

    Raises
    ------
    AssertionError
        A rank did not come to its end.
    """
    with nursery.ranks(PROGRAM, world_size) as ranks, contextlib.ExitStack() as stack:
        pids = ranks.file("pids")
        ranks.start(0)
        pids.write_text(f"{ranks.pid(0)}\n")
        if kind != "none":
            stack.enter_context(flooded(kind, count, ranks.port, pids))
            time.sleep(1.5)  # the flood is there before the ranks are
        began = time.monotonic()
        ranks.start(*range(1, world_size))
        pids.write_text("\n".join(str(ranks.pid(rank)) for rank in range(world_size)))
        ranks.await_facts("ready", patience_s=400)
        for rank in lost:
            ranks.signal(rank, signal.SIGKILL)
        left = [rank for rank in range(world_size) if rank not in lost]
        ranks.await_facts("well", len(left), patience_s=400)
        ranks.wait(left)
        steps: dict[str, dict[int, list[float]]] = {}
        for fact in ranks.facts:
            if fact["what"] == "step":
                steps.setdefault(fact["name"], {}).setdefault(fact["rank"], []).append(fact["took"])
        met = max(fact["at"] for fact in ranks.facts if fact.get("name") == "meeting")
        slowest = {name: max(statistics.median(each) for each in took.values()) for name, took in steps.items()}
        return {**slowest, "meeting": met - began}


def main() -> None:
    """Run the campaign, and print what each step took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lose", choices=("last", "both"), default="last")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        nursery = Nursery(Path(folder))
        lost = (0, 1) if options.lose == "both" else (options.ranks - 1,)
        for kind in ("none", *options.kinds.split(",")):
            runs = [measure(nursery, kind, options.count, options.ranks, lost) for _ in range(options.repeat)]
            print(
                kind,
                *(f"{name}: {1e3 * statistics.median(run[name] for run in runs):.1f} ms" for name in runs[0]),
                sep="; ",
                flush=True,
            )


if __name__ == "__main__":
    main()
