"""``oneaccord doctor``: which backends are installed, which can run here, and what to type when one cannot."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from oneaccord._version import __version__
from oneaccord.cli.console import print_command, print_json, print_table, print_text
from oneaccord.common.bounded import Stuck, bounded
from oneaccord.common.folders import here
from oneaccord.common.installing import install_command
from oneaccord.common.native import why_not_native
from oneaccord.config import load
from oneaccord.config.plugins import PluginManager, get_plugin_manager
from oneaccord.config.plugins.choice import weigh
from oneaccord.config.plugins.installed import BACKEND_GROUP, EXTENSION_GROUP, InstalledPlugin, find_installed, install_hint
from oneaccord.config.plugins.loading import IN_PROCESS, named
from oneaccord.config.selection import make_selector
from oneaccord.config.sources import find_file
from oneaccord.contract.backend import BackendSpec
from oneaccord.errors import ConfigError, OneAccordError, PluginError, printable

__all__ = ["doctor"]


_WITHOUT_NATIVE = "Python moves short messages, which takes half as long again"
_DIAGNOSIS_S = 60.0
"""Seconds that a backend's diagnosis may last: it may import what the backend needs."""


@dataclass(frozen=True, slots=True)
class _Finding:
    """What is known of one backend."""

    name: str
    distribution: str
    version: str
    available: bool
    reason: str | None
    install: str
    summary: str


@dataclass(slots=True)
class _Config:
    """What the configuration says; ``lacking`` as for `PluginManager.candidates`."""

    file: str | None = None
    error: str | None = None
    backend: str | None = None
    origin: str | None = None
    lacking: Callable[[str], str | None] | None = None


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List every installed backend: can it run here, and if not, why and what to type; with the libraries and devices that it finds.

    Ends with exit code 1 where the configuration is wrong, or names what cannot run here.
    """
    manager = get_plugin_manager()
    config = _read_config(manager)
    findings = _examine(manager)
    reasons = {finding.name: finding.reason for finding in findings}

    def lacking(name: str) -> str | None:
        return reasons.get(name) or (config.lacking(name) if config.lacking is not None else None)

    chosen, passed_over = weigh(manager, lacking)
    apart, _ = weigh(manager, lacking, one_host=False)
    diagnoses = _diagnose(manager)
    extensions = _extensions(manager)
    launchers = _launchers()
    versions = _versions()
    without = why_not_native()
    if as_json:
        print_json(
            {
                "backends": [_as_dict(finding) for finding in findings],
                "auto": {
                    "backend": chosen,
                    "backend_on_several_hosts": apart,
                    "passed_over": [{"name": name, "reason": reason} for name, reason in passed_over],
                },
                "diagnoses": {
                    name: [{"what": what, "value": value} for what, value in facts] for name, facts in diagnoses.items()
                },
                "native": {"usable": not without, "reason": without or None},
                "extensions": extensions,
                "launchers": launchers,
                "config": {"file": config.file, "error": config.error, "backend": config.backend, "origin": config.origin},
                "versions": versions,
            }
        )
        raise typer.Exit(1 if config.error else 0)
    print(f"oneaccord-core {versions['oneaccord-core']}, Python {versions['python']}, NumPy {versions['numpy']}")
    print_text(f"compiled executor: {f'{without}; {_WITHOUT_NATIVE}' if without else 'yes'}", "", "  ")
    if without:
        print_command(install_command("pip install 'oneaccord[native]'"), "  try: ")
    print(printable(f"config file: {config.file or 'none'}"))
    for line in config.error.splitlines() if config.error else ():
        print_text(line, "config error: ")
    print()
    _print_findings(findings, config.error or "")
    _print_diagnoses(diagnoses)
    print()
    for extension in extensions:
        print_text(f"extension {extension['name']} ({extension['distribution']}): {extension['error'] or 'loaded'}")
    _print_launchers(launchers)
    if config.error:
        print("first repair the configuration, as said above")
        raise typer.Exit(1)
    if config.backend != "auto":
        print_text(f"programs take {config.backend}, as {config.origin} says")
        return
    where = " for ranks of one host" if apart != chosen else ""
    print(printable(f"auto takes {chosen or 'no backend'}{where}"))
    if apart != chosen:
        print_text(f"auto takes {apart or 'no backend'} for ranks of several hosts, or where {chosen} does not start")
    said = {finding.name for finding in findings if not finding.available}
    for reason, names in _by_reason(passed_over, said).items():
        print_text(f"not {', '.join(names)}: {reason}", "  ", "    ")


def _by_reason(passed_over: list[tuple[str, str]], said: set[str]) -> dict[str, list[str]]:
    """Return the backends that were passed over by the reason why, without those of which it was said that they cannot run."""
    reasons: dict[str, list[str]] = {}
    for name, reason in passed_over:
        if name not in said:
            reasons.setdefault(reason, []).append(name)
    return reasons


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        numpy = version("numpy")
    except PackageNotFoundError:
        numpy = "(not installed)"
    return {"oneaccord-core": __version__, "python": platform.python_version(), "numpy": numpy}


def _read_config(manager: PluginManager) -> _Config:
    """Read the config that counts here, and find all that is wrong with it; a doctor must not die of the illness."""
    found, errors = _Config(), []
    try:
        file = find_file(os.environ, here())
        found.file = str(file) if file else None
        resolved = load()
    except (ConfigError, PluginError) as error:
        errors.append(str(error))
    else:
        found.backend, found.lacking = resolved.settings.backend, resolved.lacking
        found.origin = resolved.origin("backend")
        errors += map(str, manager.block_broken().values())  # first: all that follows would raise them
        usable = [each.plugin.name for each in manager.describe_all() if each.error is None]
        for check in (
            lambda: resolved.explain(usable),
            lambda: found.backend == "auto" or resolved.runnable(found.backend),
            lambda: make_selector(resolved, manager),
        ):
            try:
                with _quiet():
                    check()
            except (ConfigError, PluginError) as error:
                errors.append(str(error))
    errors += map(str, manager.block_broken().values())
    # What is wrong with the chosen backend is found by more than one of these.
    found.error = "\n".join(dict.fromkeys("\n".join(errors).splitlines())) or None
    return found


def _examine(manager: PluginManager) -> list[_Finding]:
    findings = []
    for description in manager.describe_all():
        plugin, spec = description.plugin, description.spec
        if spec is None:
            reason: str | None = str(description.error)
            findings.append(_Finding(plugin.name, plugin.distribution, plugin.version, False, reason, "", ""))
            continue
        reason = manager.available(plugin.name) or _why_not_made(manager, spec)
        install = install_command(spec.install)
        findings.append(
            _Finding(plugin.name, plugin.distribution, plugin.version, reason is None, reason, install, spec.summary)
        )
    return findings


def _why_not_made(manager: PluginManager, spec: BackendSpec) -> str | None:
    """Return what is wrong with a backend that says it can run here: what makes it may need a package that its probe did not ask for."""
    try:
        bounded(lambda: manager.load_factory(spec), _DIAGNOSIS_S, "the import of its factory")
    except (Stuck, OneAccordError) as error:
        return str(error)
    return None


def _diagnose(manager: PluginManager) -> dict[str, list[tuple[str, str]]]:
    """Return what backends tell of what they need; a diagnosis that fails is a fact of its own."""
    diagnoses = {}
    for description in manager.describe_all():
        spec = description.spec
        if spec is None or spec.diagnose is None:
            continue
        try:
            facts = bounded(manager.load_diagnosis(spec), _DIAGNOSIS_S, "its diagnosis")
            diagnoses[spec.name] = [(str(what), str(value)) for what, value in facts]
        except Stuck as error:
            diagnoses[spec.name] = [("diagnosis", str(error))]
        except Exception as error:  # noqa: BLE001 - it asks libraries that may raise anything
            diagnoses[spec.name] = [("diagnosis", f"failed: {named(error)}")]
    return diagnoses


def _as_dict(finding: _Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in finding.__slots__}


def _extensions(manager: PluginManager) -> list[dict[str, str | None]]:
    with _quiet():
        errors = manager.extension_errors()
    return [
        {
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "error": str(errors[plugin.name]) if plugin.name in errors else None,
        }
        for plugin in (*manager.extensions(), *_modules(manager))
    ]


def _launchers() -> list[dict[str, Any]]:
    """Return which launchers are installed, and whether they can be used here."""
    from oneaccord.engines.registry import describe_launcher, launcher_names

    found: list[dict[str, Any]] = []
    for name in launcher_names():
        if name == "local":  # it is a part of core
            continue
        reason: str | None
        try:
            spec = describe_launcher(name)
            reason = bounded(spec.probe, _DIAGNOSIS_S, "its probe")
            about = {"summary": spec.summary, "kind": spec.kind, "install": install_command(spec.install)}
        except Exception as error:  # noqa: BLE001 - a probe asks programs and libraries that may raise anything
            about = {"summary": "", "kind": "", "install": ""}
            reason = str(error) if isinstance(error, OneAccordError | Stuck) else f"its probe failed: {named(error)}"
        found.append({"name": name, **about, "available": reason is None, "reason": reason})
    return found


def _print_launchers(launchers: list[dict[str, Any]]) -> None:
    for each in launchers:
        how = "can be used" if each["available"] else f"cannot be used: {each['reason']}"
        print_text(f"launcher {each['name']}{': ' if each['summary'] else ''}{each['summary']}: {how}", "", "  ")
        if not each["available"] and each["install"]:
            print_command(each["install"], "  try: ")


def _modules(manager: PluginManager) -> list[InstalledPlugin]:
    """Return the modules that the configuration names and that have no entry point."""
    known = {plugin.name for plugin in find_installed(BACKEND_GROUP, EXTENSION_GROUP)}
    return [InstalledPlugin(name, IN_PROCESS, "", name) for name in manager.switches.load if name not in known]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the logger of plugins silent: what it would say stands on the page."""
    logger = logging.getLogger("oneaccord.plugins")
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def _print_findings(findings: list[_Finding], said: str) -> None:
    if not findings:
        print("no backend is installed; install one, for example:")
        print_command(install_hint("tcp"), "  ")
        return
    print_table(
        ("backend", "version", "runs", "what it is"),
        [(each.name, each.version, "yes" if each.available else "no", _about(each)) for each in findings],
    )
    for finding in findings:
        if not finding.available and (finding.reason or "") not in said:
            print()
            print_text(f"{finding.name} cannot run: {finding.reason}")
            if finding.install:
                print_command(finding.install, "  try: ")


def _about(finding: _Finding) -> str:
    """Return what a backend is, and who brings it where the name does not tell."""
    if finding.distribution == f"oneaccord-{finding.name}":
        return finding.summary
    return f"{finding.summary} ({finding.distribution})".strip()


def _print_diagnoses(diagnoses: dict[str, list[tuple[str, str]]]) -> None:
    for name, facts in diagnoses.items():
        print(printable(f"\n{name}:"))
        width = max((len(what) for what, _ in facts), default=0)
        for what, value in facts:
            # Libraries may say why in several lines.
            print_text(" ".join(value.split()), f"  {what.ljust(width)}  ", " " * (width + 4))
