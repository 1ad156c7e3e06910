"""``oneaccord bench --algorithms`` and ``--tune``: the time of each algorithm on this machine, and a table of the fastest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from oneaccord.cli.console import print_table
from oneaccord.common.units import bytes_text, time_text
from oneaccord.config.sources import as_toml
from oneaccord.errors import CommError, UsageError
from oneaccord.local.guard import guarded
from oneaccord.schedule.steps import Collective
from oneaccord_lab.commands.bench_ranks import names_of, start_ranks, write_json
from oneaccord_lab.commands.files import write_text

if TYPE_CHECKING:
    from oneaccord.config.select import Rule, Selector
    from oneaccord.local.resolve import Resolution
    from oneaccord_lab.tuning.plan import Point

__all__ = ["compare_algorithms"]


def compare_algorithms(
    collective: str,
    ranks: int,
    backend: str | None,
    file: str | None,
    sizes: Sequence[int] | None,
    budget_s: float,
    target: Path | None,
    json_file: str | None,
) -> None:
    """Measure the algorithms of some collectives, each in turn; print their times.

    A time is that of the slowest rank, the median over all rounds. If ``target`` is given, the fastest become a table there, which the
    setting `selection` may name; sizes and worlds that were not measured keep the table that comes with oneaccord.

    Raises
    ------
    UsageError
        An argument cannot be, or a file cannot be written.
    PluginError
        The backend is not installed, or cannot run here.
    CommError
        A rank failed.
    """
    from oneaccord.local.resolve import resolve_launcher
    from oneaccord_lab.tuning.plan import DEFAULT_SIZES

    names = names_of(collective, [each.value for each in Collective])
    if backend is not None and "," in backend:
        raise UsageError(
            f"--backends {backend}: algorithms are compared on one backend, and a table is for one backend; name one"
        )
    resolution = resolve_launcher(backend, file)
    selector = _selector(file)
    ranks_per_host = resolution.settings.ranks_per_host or ranks
    collectives = [Collective(name) for name in names]
    points = _measure(resolution, selector, collectives, ranks, ranks_per_host, list(sizes or DEFAULT_SIZES), budget_s, file)
    rules: list[Rule] = []
    if target is not None:
        from oneaccord_lab.tuning.measured import measured_rules

        hosts = -(-ranks // ranks_per_host)
        algorithms = [each for one in collectives for each in selector.algorithms(one)]
        rules = measured_rules(points, ranks, hosts, algorithms)
        if rules:
            _write(target, rules, resolution.backend, ranks)
    if json_file is not None:
        write_json(_as_json(points, resolution.backend, ranks, target if rules else None), json_file)
    if json_file != "-":
        _print_points(points)
        if target is not None:
            _print_rules(rules, target)


def _as_json(points: Sequence[Point], backend: str, ranks: int, table: Path | None) -> str:
    told = {
        "backend": backend,
        "ranks": ranks,
        "points": [
            {"collective": each.collective, "bytes": each.nbytes, "times_s": each.times, "rounds": each.rounds}
            for each in points
        ],
        "table": None if table is None else str(table),
    }
    return json.dumps(told, indent=2)


def _selector(file: str | None) -> Selector:
    from oneaccord.config import load
    from oneaccord.config.plugins import get_plugin_manager
    from oneaccord.config.selection import make_selector

    return make_selector(load(file), get_plugin_manager())


def _measure(
    resolution: Resolution,
    selector: Selector,
    collectives: Sequence[Collective],
    ranks: int,
    ranks_per_host: int,
    sizes: list[int],
    budget_s: float,
    file: str | None,
) -> list[Point]:
    """Run the ranks, and return the records of rank 0."""
    from oneaccord.config.select import candidates
    from oneaccord_lab.tuning.plan import Plan, Point

    with guarded() as guard:
        result = guard.folder / "points.json"
        named = {
            each.value: [found.name for found in candidates(selector.algorithms(each), ranks, ranks_per_host)]
            for each in collectives
        }
        plan = Plan(named, sizes, budget_s, resolution.backend, str(result))
        code = start_ranks("oneaccord_lab.tuning.measure", plan.dump(), ranks, [resolution], file)
        if code != 0 or not result.exists():
            raise CommError(f"nothing was measured: a rank failed, as shown above (exit code {code})")
        return msgspec.json.decode(result.read_bytes(), type=list[Point])


def _write(path: Path, rules: Sequence[Rule], backend: str, ranks: int) -> None:
    from oneaccord.config.select import write_table

    heading = [
        f"Measured by `oneaccord bench --tune` with {ranks} ranks on one host over {backend}.",
        "For a call without a row here, the table that comes with oneaccord decides.",
    ]
    write_text("--output", path, write_table(rules, heading))


def _print_points(points: Sequence[Point]) -> None:
    from oneaccord_lab.tuning.ranges import losses

    rows = []
    for point in points:
        size = "" if point.collective == Collective.BARRIER.value else bytes_text(point.nbytes)
        if not point.times:
            rows.append((point.collective, size, "not measured: the budget is used up", "", ""))
        for name, loss in sorted(losses(point.times).items(), key=lambda item: item[1]) if point.times else ():
            rows.append((point.collective, size, name, time_text(point.times[name]), f"+{loss:.0%}" if loss else "fastest"))
    print_table(("collective", "size", "algorithm", "time", ""), rows)


def _print_rules(rules: Sequence[Rule], path: Path) -> None:
    print()
    if not rules:
        print("no table is written: nothing was measured; give more time with --budget")
        return
    print_table(
        ("collective", "up to", "algorithm", "reason"),
        [
            (rule.collective.value, "" if rule.max_bytes is None else bytes_text(rule.max_bytes), rule.algorithm, rule.reason)
            for rule in rules
        ],
    )
    print(f"\nwrote {path}; to use it, add this line to oneaccord.toml:\n\nselection = {as_toml(path)}")
