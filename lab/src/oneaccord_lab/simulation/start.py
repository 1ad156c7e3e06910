"""How long a job takes to start on hosts that need not exist: a model of its stages, with what was measured on few."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oneaccord.errors import UsageError

__all__ = ["Costs", "Stage", "predict_start"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What the stages cost; docs/explanation/simulation.md says where each number comes from.

    Attributes
    ----------
    client_s
        Processor time of the launcher for each ssh client that it starts.
    login_s
        From the start of a client until its program runs.
    python_s
        From there until the agent has imported what the ranks need.
    rank_s
        Processor time of a rank from its fork to the end of its first all_reduce.
    join_s
        Processor time of the store for each rank that it takes in.
    card_bytes
        What the store tells each rank about each rank.
    seal_s_per_byte
        Processor time of the store for each byte that it sends.
    bytes_per_s
        The bandwidth of the host of rank 0.
    round_s
        One round of the first all_reduce, with its new connection.
    """

    client_s: float = 0.01
    login_s: float = 0.2
    python_s: float = 0.3
    rank_s: float = 0.062
    join_s: float = 0.0023
    card_bytes: float = 200.0
    seal_s_per_byte: float = 2e-9
    bytes_per_s: float = 1.25e9
    round_s: float = 0.002


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the start, and its seconds if one launcher reaches all hosts, and if launchers form a tree."""

    name: str
    star_s: float
    tree_s: float


def predict_start(
    hosts: int, per_host: int, processors: int | None = None, fan_out: int = 32, costs: Costs | None = None
) -> list[Stage]:
    """Return the stages of a start, in their order; none overlaps the next.

    Parameters
    ----------
    hosts, per_host
        How many hosts, and how many ranks on each.
    processors
        The processors of each host, and of the launcher's; by default one for each rank.
    fan_out
        In a tree, how many hosts each launcher reaches.
    costs
        What the stages cost.

    Raises
    ------
    UsageError
        A number is below 1, or the fan-out below 2.
    """
    if min(hosts, per_host, 1 if processors is None else processors) < 1 or fan_out < 2:
        raise UsageError(
            f"{hosts} hosts with {per_host} ranks and {processors} processors each, {fan_out} hosts for each launcher of a tree: give at least 1 of each, "
            "and 2 hosts for each launcher"
        )
    cost = costs or Costs()
    at_once = per_host if processors is None else processors
    ranks = hosts * per_host
    table = ranks * ranks * cost.card_bytes
    levels, reached = 1, fan_out  # a level begins when the one above it has its Python
    while reached < hosts:
        levels += 1
        reached += fan_out**levels
    reach = cost.client_s / at_once
    star, tree = hosts * reach + cost.login_s, levels * (min(hosts, fan_out) * reach + cost.login_s)
    # The store sends the table to each rank, and a tree of launchers does not change that.
    return [
        Stage("reach the hosts", star, tree),
        Stage("start Python there", cost.python_s, levels * cost.python_s),
        Stage("start the ranks", *[cost.rank_s * math.ceil(per_host / at_once)] * 2),
        Stage("meet at the store", *[ranks * cost.join_s] * 2),
        Stage("tell all ranks of all", *[table * (cost.seal_s_per_byte + (1 / cost.bytes_per_s if hosts > 1 else 0.0))] * 2),
        Stage("first all_reduce", *[math.ceil(math.log2(ranks)) * cost.round_s if ranks > 1 else 0.0] * 2),
    ]
