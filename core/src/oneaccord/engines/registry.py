"""The launchers that are installed, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from oneaccord.common.installing import install_command
from oneaccord.config.plugins.installed import did_you_mean
from oneaccord.contract.config import BackendConfig
from oneaccord.contract.launcher import HostLauncher, JobLauncher, LauncherSpec
from oneaccord.contract.workers import WorkerLauncher
from oneaccord.engines.host_workers import HostWorkers
from oneaccord.engines.local import LocalOptions
from oneaccord.errors import BackendUnavailableError, PluginError, UsageError

__all__ = ["describe_launcher", "launcher_names", "make_host_launcher", "make_job_launcher", "make_launcher", "options_of"]

_GROUP = "oneaccord.launchers"
_OWN = {name: f"oneaccord[{name}]" for name in ("dask", "kubernetes", "ray", "slurm", "ssh")} | {"pbs": "oneaccord[slurm]"}
"""The launchers of this project that are distributions of their own, and what installs them."""


def launcher_names() -> list[str]:
    """Return the names of all launchers that are installed, with `local`."""
    return sorted({"local", *(each.name for each in entry_points(group=_GROUP))})


def describe_launcher(name: str) -> LauncherSpec:
    """Import the plugin of a launcher, and no other; return its description.

    Parameters
    ----------
    name
        The name of its entry point.

    Raises
    ------
    UsageError
        There is none of that name; the message says what there is.
    PluginError
        The plugin cannot be imported, or does not register a launcher of that name.
    """
    found = [each for each in entry_points(group=_GROUP) if each.name == name]
    if not found:
        names = launcher_names()
        install = install_command(f"pip install '{_OWN[name]}'") if name in _OWN else ""
        hint = f"; install it with: {install}" if install else did_you_mean(name, names)
        raise UsageError(f"there is no launcher {name!r}{hint}")
    if len({each.value for each in found}) > 1:
        raise PluginError(f"the launcher {name!r} is provided more than once, by {' and '.join(each.value for each in found)}")
    try:
        specs = found[0].load().register_launchers()
        return next(spec for spec in specs if isinstance(spec, LauncherSpec) and spec.name == name)
    except StopIteration:
        raise PluginError(f"the plugin {found[0].value!r} registers no launcher {name!r}") from None
    except Exception as error:
        raise PluginError(f"the plugin {found[0].value!r} cannot be loaded: {type(error).__name__}: {error}") from error


def make_launcher(name: str, options: Mapping[str, Any]) -> WorkerLauncher:
    """Return a new launcher of workers; one that gives hosts gets workers there, which take the options of `LocalOptions` too.

    Raises
    ------
    UsageError
        As for `describe_launcher`; or an option is unknown or wrong.
    PluginError
        As for `describe_launcher`; `BackendUnavailableError` if it cannot be used here.
    """
    spec = describe_launcher(name)
    if spec.kind == "hosts":
        own = {key: value for key, value in options.items() if key in LocalOptions.__dataclass_fields__}
        others = {key: value for key, value in options.items() if key not in own}
        return HostWorkers(make_host_launcher(name, others), LocalOptions(**own))
    if spec.kind == "jobs":
        raise UsageError(
            f"the launcher {name!r} runs programs, and has no way to send a function to them: put the function in a script, and start it by "
            f"oneaccord run --on {name} -n NUMBER script.py"
        )
    launcher: WorkerLauncher = _make(spec, options)
    return launcher


def make_host_launcher(name: str, options: Mapping[str, Any]) -> HostLauncher:
    """Return a new launcher of hosts.

    Parameters
    ----------
    name
        Its name.
    options
        What its model of options takes.

    Raises
    ------
    UsageError
        As for `describe_launcher`; or an option is unknown or wrong, or the launcher has workers.
    PluginError
        As for `describe_launcher`; `BackendUnavailableError` if it cannot be used here.
    """
    spec = describe_launcher(name)
    if spec.kind != "hosts":
        raise UsageError(
            f"the launcher {name!r} calls functions in workers, and starts no programs: use launch(function, n, on={name!r}) in a program"
        )
    launcher: HostLauncher = _make(spec, options)
    return launcher


def make_job_launcher(name: str, options: Mapping[str, Any]) -> JobLauncher:
    """Return a new launcher of whole jobs, whether or not its engine is there.

    Raises
    ------
    UsageError, PluginError
        As for `describe_launcher`; or an option is unknown or wrong.
    """
    launcher: JobLauncher = _configured(describe_launcher(name), options)
    return launcher


def options_of(name: str) -> type[BackendConfig]:
    """Return the model of a launcher's options."""
    kind: type[BackendConfig] = _load(describe_launcher(name).config, name)
    return kind


def _make(spec: LauncherSpec, options: Mapping[str, Any]) -> Any:
    name = spec.name
    if (reason := spec.probe()) is not None:
        remedy = f"; try: {install_command(spec.install)}" if spec.install else ""
        raise BackendUnavailableError(f"the launcher {name!r} cannot be used here: {reason}{remedy}")
    return _configured(spec, options)


def _configured(spec: LauncherSpec, options: Mapping[str, Any]) -> Any:
    name = spec.name
    kind: type[BackendConfig] = _load(spec.config, name)
    try:
        config = kind(**options)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise UsageError(f"options of on={name!r}: {'; '.join(wrong)}. There are: {', '.join(kind.model_fields)}") from None
    return _load(spec.factory, name)(config)


def _load(target: str, name: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"the launcher {name!r} cannot be loaded from {target!r}: {error}") from error
