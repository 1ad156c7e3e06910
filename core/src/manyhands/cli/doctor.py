"""``manyhands doctor``: which backends are installed, which can run here, and what to type when one cannot."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from manyhands._version import __version__
from manyhands.cli.console import print_json, print_table
from manyhands.config import load
from manyhands.errors import ConfigError, PluginError
from manyhands.plugins import PluginManager, get_plugin_manager
from manyhands.plugins.installed import install_hint
from manyhands.plugins.loading import load as load_function
from manyhands.plugins.loading import named
from manyhands.provenance import find_file

__all__ = ["doctor"]


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


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List every installed backend: can it run here, and if not, why and what to type; with the libraries and devices that it finds."""
    manager = get_plugin_manager()
    file, config_error = _config_file()
    findings = _examine(manager)
    chosen, passed_over = manager.weigh()
    apart, _ = manager.weigh(one_host=False)
    diagnoses = _diagnose(manager)
    extensions = _extensions(manager)
    versions = _versions()
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
                "extensions": extensions,
                "config": {"file": file, "error": config_error},
                "versions": versions,
            }
        )
        return
    print(f"manyhands-core {versions['manyhands-core']}, Python {versions['python']}, NumPy {versions['numpy']}")
    print(f"config file: {file or 'none'}")
    if config_error:
        print(f"config error: {config_error}")
    print()
    _print_findings(findings)
    _print_diagnoses(diagnoses)
    print()
    where = " for ranks of one host" if apart != chosen else ""
    print(f"auto takes {chosen or 'no backend'}{where}")
    for name, reason in passed_over:
        print(f"  not {name}: {reason}")
    if apart != chosen:
        print(f"auto takes {apart or 'no backend'} for ranks of several hosts, and where {chosen} does not start on all ranks")
    for extension in extensions:
        print(f"extension {extension['name']} ({extension['distribution']}): {extension['error'] or 'loaded'}")


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        numpy = version("numpy")
    except PackageNotFoundError:
        numpy = "(not installed)"
    return {"manyhands-core": __version__, "python": platform.python_version(), "numpy": numpy}


def _config_file() -> tuple[str | None, str | None]:
    """Return the config file that counts here, and what is wrong with it; a doctor must not die of the illness."""
    file = None
    try:
        file = find_file(os.environ, Path.cwd())
        resolved = load()
        if resolved.settings.backend != "auto":
            resolved.runnable(resolved.settings.backend)
    except (ConfigError, PluginError) as error:
        return (str(file) if file else None), str(error)
    return (str(file) if file else None), None


def _examine(manager: PluginManager) -> list[_Finding]:
    findings = []
    for description in manager.describe_all():
        plugin, spec = description.plugin, description.spec
        if spec is None:
            reason: str | None = str(description.error)
            findings.append(_Finding(plugin.name, plugin.distribution, plugin.version, False, reason, "", ""))
            continue
        reason = manager.available(plugin.name)
        install = spec.install or install_hint(plugin.name)
        findings.append(
            _Finding(plugin.name, plugin.distribution, plugin.version, reason is None, reason, install, spec.summary)
        )
    return findings


def _diagnose(manager: PluginManager) -> dict[str, list[tuple[str, str]]]:
    """Return what backends tell of what they need; a diagnosis that fails is a fact of its own."""
    diagnoses = {}
    for description in manager.describe_all():
        spec = description.spec
        if spec is None or spec.diagnose is None:
            continue
        try:
            found = load_function(spec, spec.diagnose, "diagnosis")()
            diagnoses[spec.name] = [(str(what), str(value)) for what, value in found]
        except Exception as error:  # noqa: BLE001 - it asks libraries that may raise anything
            diagnoses[spec.name] = [("diagnosis", f"failed: {named(error)}")]
    return diagnoses


def _as_dict(finding: _Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in finding.__slots__}


def _extensions(manager: PluginManager) -> list[dict[str, str | None]]:
    manager.load_extensions()
    errors = manager.extension_errors()
    return [
        {
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "error": str(errors[plugin.name]) if plugin.name in errors else None,
        }
        for plugin in manager.extensions()
    ]


def _print_findings(findings: list[_Finding]) -> None:
    if not findings:
        print(f"no backend is installed; install one, for example with: {install_hint('tcp')}")
        return
    print_table(
        ("backend", "distribution", "version", "available", "summary"),
        [(each.name, each.distribution, each.version, "yes" if each.available else "no", each.summary) for each in findings],
    )
    for finding in findings:
        if not finding.available:
            print(f"\n{finding.name} cannot run: {finding.reason}")
            if finding.install:
                print(f"  try: {finding.install}")


def _print_diagnoses(diagnoses: dict[str, list[tuple[str, str]]]) -> None:
    for name, facts in diagnoses.items():
        print(f"\n{name}:")
        width = max((len(what) for what, _ in facts), default=0)
        for what, value in facts:
            print(f"  {what.ljust(width)}  {' '.join(value.split())}")  # libraries may say why in several lines
