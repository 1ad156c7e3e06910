"""``oneaccord check launcher``: find out whether a launcher keeps what core relies on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from oneaccord import UsageError

if TYPE_CHECKING:
    from oneaccord_conformance.launchers import Finding

__all__ = ["check_launcher"]


def check_launcher(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The launcher.", show_default=False)],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="How many ranks it is asked for.")] = 2,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the launcher; may be given again.", metavar="KEY=VALUE", show_default=False),
    ] = None,
    hosts: Annotated[str | None, typer.Option(help="The hosts, as for run.", metavar="HOST:N,...", show_default=False)] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="The most seconds of each step.")] = 60.0,
) -> None:
    """Check that a launcher keeps the contract of oneaccord: hosts, commands, ends, and a function on all ranks.

    Ends with exit code 0 if it does, and 1 if a check failed.
    """
    from oneaccord_conformance import launchers

    options: dict[str, object] = {}
    for text in option or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--option {text}: write KEY=VALUE")
        options[key] = value
    if hosts is not None:
        options["hosts"] = hosts.split(",")

    def tell(finding: Finding) -> None:
        print(f"{'failed' if finding.fault else 'passed'}  {finding.name:12} {finding.promise}", flush=True)
        if finding.fault:
            print(f"        {finding.fault}", flush=True)

    findings = launchers.check_launcher(name, options, ranks, timeout_s, tell)
    failed = sum(bool(finding.fault) for finding in findings)
    print(f"the launcher {name!r}: {f'{failed} of {len(findings)} checks failed' if failed else 'keeps the contract'}")
    raise typer.Exit(1 if failed else 0)
