"""``manyhands bench``: what each algorithm takes on this machine, and a table that makes manyhands take the fastest."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.console import print_json, print_table
from manyhands.errors import CommError, ConfigError, InvalidWorldSizeError, UsageError
from manyhands.schedule.steps import Collective

if TYPE_CHECKING:
    from manyhands.launch.resolve import Resolution
    from manyhands.select import Rule, Selector
    from manyhands.tuning.plan import Point

__all__ = ["bench"]

_ALL = "all"


def bench(
    collective: Annotated[
        str, typer.Argument(metavar="COLLECTIVE", help="What to measure, such as all_reduce; or all.")
    ] = _ALL,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="How many ranks to start on this host.")] = 4,
    tune: Annotated[bool, typer.Option("--tune", help="Write a table that makes manyhands take what was fastest.")] = False,
    backend: Annotated[
        str | None, typer.Option(help="The backend, instead of that of the configuration.", show_default=False)
    ] = None,
    config: Annotated[str | None, typer.Option(help="The configuration file.", metavar="FILE", show_default=False)] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="The sizes of the calls, such as 8,1KiB,1MiB; by default 8 B to 16 MiB.", show_default=False),
    ] = None,
    budget_s: Annotated[
        float, typer.Option("--budget", help="Seconds that measuring may take; what is left over then is not measured.")
    ] = 60.0,
    output: Annotated[
        Path | None, typer.Option(help="Where --tune writes the table; tuned.toml by default.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the algorithms of a collective on ranks of this host, each in turn, with every result checked.

    A time is that of the slowest rank, the median over all rounds. With --tune, the fastest become a table that the setting
    `selection` names; sizes and worlds that were not measured keep the table that comes with manyhands.
    """
    from manyhands.launch.resolve import resolve_launcher

    if output is not None and not tune:
        raise UsageError("--output is where --tune writes its table, and --tune was not given: give both, or neither")
    target = output or Path("tuned.toml")
    if tune and output is None and target.exists():
        raise UsageError(
            f"{target} is there already, with rows that may have taken long to measure: name another file, or this one, by --output"
        )
    if ranks < 1:
        raise InvalidWorldSizeError(f"-n {ranks}: a job has at least one rank; give -n 1 or more")
    if not 0 < budget_s < float("inf"):
        raise UsageError(f"--budget {budget_s:g}: expected a positive number of seconds")
    if config is not None and not Path(config).is_file():
        raise ConfigError(
            f"--config {config}: there is no such file in {Path.cwd()}", file="argument", key="config", value=config
        )
    collectives = _collectives(collective)
    file = None if config is None else str(Path(config).resolve())
    nbytes = _sizes(sizes)
    resolution = resolve_launcher(backend, file)
    selector = _selector(file)
    ranks_per_host = resolution.settings.ranks_per_host or ranks
    points = _measure(resolution, selector, collectives, ranks, ranks_per_host, nbytes, budget_s, file)
    rules: list[Rule] = []
    if tune:
        from manyhands.tuning.measured import measured_rules

        hosts = -(-ranks // ranks_per_host)
        algorithms = [each for one in collectives for each in selector.algorithms(one)]
        rules = measured_rules(points, ranks, hosts, algorithms)
    if tune and rules:
        _write(target, rules, resolution.backend, ranks)
    if as_json:
        print_json(
            {
                "backend": resolution.backend,
                "ranks": ranks,
                "points": [
                    {"collective": each.collective, "bytes": each.nbytes, "times_s": each.times, "rounds": each.rounds}
                    for each in points
                ],
                "table": target if rules else None,
            }
        )
        return
    _print_points(points)
    if tune:
        _print_rules(rules, target)


def _collectives(name: str) -> list[Collective]:
    known = {collective.value: collective for collective in Collective}
    if name == _ALL:
        return list(known.values())
    if name not in known:
        from manyhands.plugins.installed import nearest

        close = nearest(name, [*known, _ALL])
        hint = f"; did you mean {close!r}?" if close else "."
        raise UsageError(f"there is no collective {name!r}{hint} Valid here: {', '.join([*known, _ALL])}")
    return [known[name]]


def _sizes(text: str | None) -> list[int]:
    from manyhands.tuning.plan import DEFAULT_SIZES

    if text is None:
        return list(DEFAULT_SIZES)
    from manyhands.cli.sizes import parse_bytes

    return sorted({parse_bytes(word.strip()) for word in text.split(",")})


def _selector(file: str | None) -> Selector:
    from manyhands.config import load, make_selector
    from manyhands.plugins import get_plugin_manager

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
    """Run the ranks, and return what rank 0 wrote down."""
    import json

    from manyhands.select import candidates
    from manyhands.tuning.plan import Plan, Point

    environ = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        result = Path(folder, "points.json")
        named = {
            each.value: [found.name for found in candidates(selector.algorithms(each), ranks, ranks_per_host)]
            for each in collectives
        }
        plan = Plan(named, sizes, budget_s, resolution.backend, str(result))
        code = _run(resolution, plan.dump(), ranks, {"MANYHANDS_CONFIG": file} if file else {}, environ)
        if code != 0 or not result.exists():
            raise CommError(f"nothing was measured: a rank failed, as is said above (exit code {code})")
        return [Point(**point) for point in json.loads(result.read_text(encoding="utf-8"))]


def _run(resolution: Resolution, plan: str, ranks: int, chosen: dict[str, str], environ: dict[str, Any]) -> int:
    module = "manyhands.tuning.worker"
    if resolution.launcher is None:
        from manyhands.launch.launching import Launch
        from manyhands.launch.processes import run_job

        return run_job(Launch(module, True, (plan,), ranks, environ=chosen), environ)
    from manyhands.backend import LaunchRequest

    return resolution.launcher(LaunchRequest(module, True, (plan,), ranks, resolution.backend, chosen))


def _write(path: Path, rules: Sequence[Rule], backend: str, ranks: int) -> None:
    from manyhands.select import write_table

    heading = [
        f"Measured by `manyhands bench --tune` with {ranks} ranks on one host over {backend}.",
        "Whatever no row here is for is decided by the table that comes with manyhands.",
    ]
    try:
        path.write_text(write_table(rules, heading), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}; name another file") from None


def _print_points(points: Sequence[Point]) -> None:
    from manyhands.tuning.ranges import losses, time_text

    rows = []
    for point in points:
        size = "" if point.collective == Collective.BARRIER.value else str(point.nbytes)
        if not point.times:
            rows.append((point.collective, size, "", "not measured: the budget is used up", ""))
        for name, loss in sorted(losses(point.times).items(), key=lambda item: item[1]) if point.times else ():
            rows.append((point.collective, size, name, time_text(point.times[name]), f"+{loss:.0%}" if loss else "fastest"))
    print_table(("collective", "bytes", "algorithm", "time", ""), rows)


def _print_rules(rules: Sequence[Rule], path: Path) -> None:
    print()
    if not rules:
        print("no table is written: nothing was measured; give more time with --budget")
        return
    print_table(
        ("collective", "up to bytes", "algorithm", "reason"),
        [
            (rule.collective.value, "" if rule.max_bytes is None else str(rule.max_bytes), rule.algorithm, rule.reason)
            for rule in rules
        ],
    )
    print(f'\nwrote {path}; to use it, add this line to manyhands.toml:\n\nselection = "{path}"')
