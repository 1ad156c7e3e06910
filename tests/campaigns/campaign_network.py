"""A campaign of faults of the network: hosts whose packets are lost, late and few, which are cut off for a while or for good. Each case is made of a seed.

What must hold of every case:

- no result is wrong, and no rank hangs;
- bad weather (loss, delay, little bandwidth, short packets) and a short cut change nothing but the time;
- if hosts are cut apart for good, every rank learns of it, names a rank that it cannot reach, and no two parts go on: the larger one does, or that
  with the store.

Over mpi, whose launcher ends all where one is lost, nobody goes on.

Usage: PYTHONPATH=tests python tests/campaigns/campaign_network.py [--cases N] [--seed FIRST] [--backends tcp,mpi] [--minutes M]

Hosts are network namespaces, joined by `user_space_network`. That needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from campaigns.campaign_faults import STEP, Failed, MpiRanks, mpi_is_here
from support.fault_tools import Nursery, Ranks
from support.user_space_network import ENTER, Network, can_make_networks
from support.worlds import free_port

from oneaccord_mpi.command import family_of
from oneaccord_mpi.finding import find_mpiexec

__all__ = ["KINDS", "Case", "case_of", "judge", "run_case"]

KINDS: Final = {
    "weather": "the network is bad",
    "short": "hosts are cut apart for a moment",
    "long": "hosts are cut apart for good",
}
_NOTICED_S = 16.0
"""How long after a cut the last rank may learn of it: heartbeats are missed for 10 s, and then some ranks ask others."""

_AGENT: Final = """#!/bin/sh
# Start a command on another host, as ssh does: AGENT [OPTIONS] ADDRESS COMMAND...
while [ "${1#-}" != "$1" ]; do shift; done
address=$1
shift
exec nsenter --net="$(sed -n "s/^$address //p" "$HOSTS")" unshare --uts sh -c "hostname $address; $*"
"""

PROGRAM = (
    """
import random
faulthandler.cancel_dump_traceback_later()
faulthandler.dump_traceback_later(85, exit=True)
case = json.loads(os.environ["CASE"])
choice = random.Random(case["seed"])
if case["backend"] == "mpi":
    del os.environ["RANK"], os.environ["WORLD_SIZE"]  # read above; with them these would be ranks of torchrun
"""
    + STEP
    + """
try:
    group = oa.init(case["backend"], timeout_s=60)
    group.barrier()
    tell("ready")
    for step in range(case["steps"]):
        one_step(group, step, choice)
    until_told_to_go()
    for step in range(case["steps"]):
        one_step(group, step, choice)
    while case["kind"] == "long":
        group.barrier()
    group.close()
    tell("well")
except oa.CommError as error:
    tell("raised", type=type(error).__name__, text=str(error)[:1500], about=error.peer)
    if case["kind"] != "long" or case["backend"] == "mpi":
        raise
    try:
        group = group.shrink(timeout_s=20)
    except oa.CommError as error:
        tell("ended", type=type(error).__name__, text=str(error)[:500])
        raise SystemExit(0)
    choice = random.Random(case["seed"] + 1)
    for step in range(4):
        one_step(group, step, choice)
    group.close()
    tell("went on", of=group.world_size)
"""
)


@dataclass(frozen=True)
class Case:
    """What is done in one case.

    Attributes
    ----------
    seed
        What it is made of.
    backend
        Over what.
    kind
        One of `KINDS`.
    hosts, ranks_per_host, steps
        In which world, and how many calls the ranks make before the cut and after it.
    mtu, is_ipv6, loss, delay_s, bytes_per_s
        As for `Network`.
    groups
        Which hosts still reach each other in a cut.
    cut_s
        How long a short cut lasts.
    """

    seed: int
    backend: str
    kind: str
    hosts: int
    ranks_per_host: int
    steps: int
    mtu: int
    is_ipv6: bool
    loss: float
    delay_s: float
    bytes_per_s: float
    groups: tuple[tuple[int, ...], tuple[int, ...]]
    cut_s: float

    @property
    def words(self) -> str:
        """The case in words."""
        return f"{self.hosts} hosts of {self.ranks_per_host} ranks over {self.backend}, {KINDS[self.kind]}: {asdict(self)}"

    def side(self, rank: int) -> int:
        """Return on which side of a cut a rank is."""
        return 0 if rank // self.ranks_per_host in self.groups[0] else 1


def case_of(seed: int, kinds: tuple[str, ...] = tuple(KINDS), backend: str = "tcp") -> Case:
    """Return the case of a seed."""
    chance = random.Random(seed)
    kind, hosts = chance.choice(kinds), chance.randint(2, 4)
    order = chance.sample(range(hosts), hosts)
    at = chance.randint(1, hosts - 1)
    bad = kind == "weather"
    return Case(
        seed,
        backend,
        kind,
        hosts,
        chance.randint(1, 2),
        chance.randint(2, 8),
        chance.choice([576, 1280, 1500, 9000]) if bad else 1500,
        chance.random() < 0.3 and backend != "mpi",  # mpiexec reads no such addresses in its lists of hosts
        chance.choice([0.0, 0.01, 0.05]) if bad else 0.0,
        chance.choice([0.0, 0.001, 0.01]) if bad else 0.0,
        chance.choice([0.0, 0.0, 5e6]) if bad else 0.0,
        (tuple(order[:at]), tuple(order[at:])),
        chance.choice([0.05, 0.5, 2.0]),
    )


def run_case(nursery: Nursery, case: Case) -> None:
    """Run a case.

    Raises
    ------
    Failed
        Something does not hold, in words.
    """
    weather = Network(
        case.hosts,
        max(case.mtu, 1280) if case.is_ipv6 else case.mtu,
        case.is_ipv6,
        case.seed,
        case.loss,
        case.delay_s,
        case.bytes_per_s,
    )
    size = case.hosts * case.ranks_per_host
    with weather as network, _started(nursery, case, network) as ranks:
        try:
            ranks.await_facts("ready", size)
            cut_at = time.monotonic()
            with contextlib.ExitStack() as stack:
                if case.kind != "weather":
                    stack.enter_context(network.cut(*case.groups))
                ranks.go()
                if case.kind == "short":
                    time.sleep(case.cut_s)
                    stack.close()
                ranks.wait(timeout_s=90)
            (judge_mpi if case.backend == "mpi" else judge)(ranks, case, cut_at)
        except AssertionError as error:
            told = "\n".join(f"  {fact}" for fact in ranks.facts)
            raise Failed(f"{error}\ntold:\n{told}\nwritten: {ranks.output()[-3000:]}") from None


@contextlib.contextmanager
def _started(nursery: Nursery, case: Case, network: Network) -> Iterator[Ranks]:
    """Start the ranks of a case on their hosts."""
    size, told = case.hosts * case.ranks_per_host, json.dumps(asdict(case))
    if case.backend != "mpi":
        with nursery.ranks(ENTER + PROGRAM, size, MASTER_ADDR=network.address(0), CASE=told) as ranks:
            for rank in range(size):
                ranks.start(rank, NAMESPACE=network.namespace(rank // case.ranks_per_host))
            yield ranks
        return
    with tempfile.TemporaryDirectory(prefix="mpi-", dir=nursery.directory) as name:
        folder, addresses = Path(name), [network.address(host) for host in range(case.hosts)]
        agent, hosts = folder / "agent", folder / "hosts"
        agent.write_text(_AGENT)
        agent.chmod(0o755)
        hosts.write_text("".join(f"{address} {network.namespace(host)}\n" for host, address in enumerate(addresses)))
        variables = {
            "CASE": told,
            "HOSTS": str(hosts),
            "ONEACCORD_BACKENDS__MPI__MPIEXEC": json.dumps(_mpiexec(case, addresses, agent)),
            "ONEACCORD_RENDEZVOUS": f"{addresses[0]}:{free_port()}",
        }
        mpi_ranks = MpiRanks(nursery, PROGRAM, size, folder / "job", variables)
        mpi_ranks.before = [str(agent), addresses[0]]
        try:
            yield mpi_ranks.start()
        finally:
            mpi_ranks.close()
            network.end_all()  # the daemons of MPI that were cut off


def _mpiexec(case: Case, addresses: Sequence[str], agent: Path) -> list[str]:
    """Return the mpiexec of this Python, with what makes it start ranks on these hosts over TCP."""
    command = [find_mpiexec() or "mpiexec"]
    each = case.ranks_per_host
    if family_of(command).name == "MPICH":
        return [*command, "-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", ",".join(addresses), "-ppn", str(each)]
    hosts = ",".join(f"{address}:{each}" for address in addresses)
    options = "--prtemca plm ssh --mca btl self,sm,tcp --mca pml ob1 --prtemca plm_ssh_agent".split()
    return [*command, *options, str(agent), "--host", hosts, "--map-by", f"ppr:{each}:node"]


def judge_mpi(ranks: Ranks, case: Case, cut_at: float) -> None:
    """Raise an `AssertionError` that says what does not hold of a job that MPI ends where a rank ends."""
    if case.kind != "long":
        judge(ranks, case, cut_at)
        return
    wrong = [fact for fact in ranks.facts if fact["what"] == "wrong"]
    assert not wrong, f"wrong results: {wrong}"
    assert ranks.codes[0] != 0, "the job ended as if all were well"
    raised = [fact for fact in ranks.facts if fact["what"] == "raised"]
    assert raised, "nobody learned of it"
    for fact in raised:
        assert fact["at"] - cut_at <= _NOTICED_S, f"rank {fact['rank']} was told only after {fact['at'] - cut_at:.1f} s"
        assert isinstance(fact["about"], int), f"rank {fact['rank']} names nobody"
        assert case.side(fact["about"]) != case.side(fact["rank"]), (
            f"rank {fact['rank']} names rank {fact['about']}, which it can reach"
        )


def judge(ranks: Ranks, case: Case, cut_at: float) -> None:
    """Raise an `AssertionError` that says what does not hold of a case whose hosts were cut apart, if they were, at ``cut_at``."""
    everybody = set(range(ranks.world_size))
    facts: dict[str, dict[int, dict[str, object]]] = collections.defaultdict(dict)
    for fact in ranks.facts:
        facts[fact["what"]][fact["rank"]] = fact
    assert not facts["wrong"], f"wrong results: {facts['wrong']}"
    if case.kind != "long":
        assert set(facts["well"]) == everybody, f"not all ended well: {sorted(facts['well'])}"
        return
    assert set(facts["raised"]) == everybody, f"not all learned of it: {sorted(facts['raised'])}"
    late = {rank: fact["at"] - cut_at for rank, fact in facts["raised"].items() if fact["at"] - cut_at > _NOTICED_S}  # type: ignore[operator]
    assert not late, f"told only after so many seconds: {late}"
    for rank, fact in facts["raised"].items():
        about = fact["about"]
        assert isinstance(about, int), f"rank {rank} names nobody"
        assert case.side(about) != case.side(rank), f"rank {rank} names rank {about}, which it can reach"
    sides = {case.side(rank) for rank in facts["went on"]}
    assert len(sides) <= 1, f"two parts go on: {sorted(facts['went on'])}"
    parts = [{rank for rank in everybody if case.side(rank) == side} for side in (0, 1)]
    larger = max(parts, key=lambda part: (len(part), 0 in part))
    assert set(facts["went on"]) == larger, f"went on: {sorted(facts['went on'])}, and should: {sorted(larger)}"


def main() -> int:
    """Run the campaign; return its exit code: 0 where all cases hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--backends", default="tcp,mpi" if mpi_is_here() else "tcp")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so long")
    words = parser.parse_args()
    if not can_make_networks():
        print("faults of the network were left out: making hosts needs root, iproute2 and /dev/net/tun")
        return 0
    until, started = time.monotonic() + 60 * words.minutes, time.monotonic()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failed: list[int] = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        nursery = Nursery(Path(folder))
        for seed in range(words.seed, words.seed + words.cases):
            if time.monotonic() > until:
                break
            backends = words.backends.split(",")
            case = case_of(seed, tuple(words.kinds.split(",")), backends[seed % len(backends)])
            try:
                run_case(nursery, case)
            except Failed as error:
                failed.append(seed)
                again = f"PYTHONPATH=tests python tests/campaigns/campaign_network.py --cases 1 --seed {seed} --kinds {words.kinds} --backends {case.backend}"
                print(f"FAILED seed {seed}: {case.words}\n{error}\nrun it alone: {again}", flush=True)
            counts[case.backend, case.kind] += 1
    print(
        f"{sum(counts.values())} cases in {time.monotonic() - started:.0f} s, {len(failed)} failed{f': seeds {failed}' if failed else ''}"
    )
    for backend in words.backends.split(","):
        print(f"  {backend}: " + ", ".join(f"{kind} {counts[backend, kind]}" for kind in KINDS))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
