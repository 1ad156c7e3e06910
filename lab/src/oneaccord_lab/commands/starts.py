"""``oneaccord simulate start``: how long a job would take to start."""

from __future__ import annotations

from dataclasses import asdict

from oneaccord.cli.console import print_json, print_table, print_text
from oneaccord.common.units import time_text
from oneaccord_lab.simulation.start import Costs, predict_start

__all__ = ["print_start"]


def print_start(ranks: int, per_host: int, *, as_json: bool) -> None:
    """Print the stages of a start, with one launcher for all hosts and with a tree of launchers."""
    hosts = -(-ranks // per_host) if per_host > 0 else 0
    costs = Costs()
    stages = predict_start(hosts, per_host, costs=costs)
    star, tree = sum(stage.star_s for stage in stages), sum(stage.tree_s for stage in stages)
    if as_json:
        print_json(
            {
                "hosts": hosts,
                "ranks": ranks,
                "stages": [asdict(stage) for stage in stages],
                "star_s": star,
                "tree_s": tree,
                "costs": asdict(costs),
            }
        )
        return
    print_text(f"a prediction: the start of {ranks:,} ranks on {hosts:,} hosts, {per_host} on each, with as many processors")
    print()
    rows = [(stage.name, time_text(stage.star_s), time_text(stage.tree_s)) for stage in stages]
    print_table(("stage", "star", "tree"), [*rows, ("in all", time_text(star), time_text(tree))])
    print()
    print_text(
        "star: one launcher reaches all hosts, as oneaccord run does. tree: each launcher reaches 32; there is none. "
        "From " + ", ".join(f"{name} = {value:g}" for name, value in asdict(costs).items())
    )
