"""Loading the configuration: layers merged, validated as a whole, every value with its origin."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from oneaccord.common.folders import here
from oneaccord.common.installing import install_command
from oneaccord.config.plugins import PluginManager, get_plugin_manager
from oneaccord.config.plugins.installed import did_you_mean, install_hint
from oneaccord.config.plugins.loading import named
from oneaccord.config.problems import as_error, from_validation, is_secret, problem
from oneaccord.config.settings import TABLES, Settings
from oneaccord.config.sources import (
    ARGUMENT,
    HIDDEN,
    MAPPING,
    REQUIRED,
    Leaf,
    Merged,
    Problem,
    find_file,
    flatten,
    merge,
    read_environment,
    read_file,
)
from oneaccord.contract.config import as_kind, model_of
from oneaccord.errors import BackendUnavailableError, ConfigError, PluginError, UnknownBackendError

if TYPE_CHECKING:
    from oneaccord.contract.backend import BackendSpec

__all__ = ["Resolved", "load"]

Model = TypeVar("Model", bound=BaseModel)


class Resolved:
    """A valid configuration, and the origin of each of its values; made by `load`.

    Attributes
    ----------
    settings
        The values.
    file
        The configuration file that was read; None if there is none.
    """

    def __init__(self, settings: Settings, file: Path | None, merged: Merged, manager: PluginManager) -> None:
        self.settings: Settings = settings
        self.file: Path | None = file
        self._merged = merged
        self._manager = manager

    def backend_config(self, name: str) -> Any:
        """Return ``[backends.NAME]`` as the config model of that backend's plugin; no other plugin is imported.

        Raises
        ------
        ConfigError
            The table does not fit the model.
        PluginError
            The plugin is not installed or cannot be described; see `PluginManager.describe`.
        """
        spec = self._manager.describe(name)
        config, problems = self._check(spec)
        if config is None:
            raise as_error(problems)
        return self._own(spec, config)

    def _own(self, spec: BackendSpec, config: BaseModel) -> Any:
        """Return a checked config as the backend's plugin has declared it."""
        return as_kind(self._manager.config_kind(spec), config)

    def _check(self, spec: BackendSpec) -> tuple[BaseModel | None, list[Problem]]:
        """Return the table of a backend as its model, or its problems."""
        return _check_table(self._manager.config_kind(spec), spec.name, self.settings.backends.get(spec.name, {}), self._merged)

    def lacking(self, name: str) -> str | None:
        """Return why a backend cannot be taken unless the user chooses it: a setting that it needs, and that is not set, or a part that cannot run.

        Returns
        -------
        str or None
            None if nothing is missing, and if its table is set: faults in the table are an error.
        """
        try:
            spec = self._manager.describe(name)
            if name not in self.settings.backends:
                _, problems = self._check(spec)
                if problems:
                    return "; ".join(each.text for each in problems)
            if spec.parts is not None:
                self.runnable(name)
        except PluginError as error:
            return str(error)
        return None

    def runnable(self, name: str, within: tuple[str, ...] = ()) -> BackendSpec:
        """Describe a backend that is asked for by its name.

        Parameters
        ----------
        name
            Its name.
        within
            The backends of which it will be a part, the outermost first.

        Raises
        ------
        BackendUnavailableError
            It, or a part of it, cannot run here; the message says what to type.
        PluginError
            There is no backend of that name, or it cannot be described.
        ConfigError
            Its table does not fit, or it would be a part of itself.
        """
        if name in within:
            circle = " -> ".join(map(repr, [*within, name]))
            raise ConfigError(f"{circle}: a backend cannot be a part of itself", key=f"backends.{within[-1]}", value=name)
        try:
            spec = self._manager.describe(name)
        except UnknownBackendError as error:
            if within and install_hint(name) and name not in self._manager.installed_names():
                text = f"the backend {within[-1]!r} should be composed of {name!r}, but {error}"
                raise BackendUnavailableError(text) from None
            raise
        reason = self._manager.available(name)
        if reason is not None:
            what_to_do = f"try: {install_command(spec.install)}" if spec.install else "see: oneaccord doctor"
            raise BackendUnavailableError(f"{self._manager.whose(spec)} cannot run here: {reason}; {what_to_do}")
        config = self.backend_config(name)
        for key, part in _parts(spec, config).items():
            path = ("backends", name, *key.split("."))
            try:
                self.runnable(part, (*within, name))
            except (UnknownBackendError, BackendUnavailableError) as error:
                found = problem(self._merged, path, part, str(error))
                if isinstance(error, UnknownBackendError):
                    raise as_error([replace(found, unknown_backend=True)]) from None
                raise BackendUnavailableError(found.text) from None
        return spec

    def given(self) -> dict[str, Any]:
        """Return the values that are set, as a mapping that says the same in place of a file."""
        return copy.deepcopy(self._merged.tree)

    def origin(self, key: str) -> str:
        """Return the origin of the value of a dotted key.

        A file's path, the name of an environment variable, ``"argument"``, ``"config argument"`` (a mapping in place of a
        file) or ``"default"``.
        """
        return self._merged.origin(key.split("."))

    def explain(self, backends: Iterable[str] = ()) -> list[tuple[str, object, str]]:
        """Return each dotted key with its value and its origin; a value that may be a secret is not shown.

        Parameters
        ----------
        backends
            Backends whose tables are shown whole, defaults included, and for which their plugins are described. For any other
            backend only the set values are shown. A key that a backend needs, and that is not set, has no
            value, and the origin `REQUIRED`.

        Raises
        ------
        ConfigError
            A table does not fit; the message has one line for each problem, of all tables. A table that is not set is
            right until its backend is chosen.
        PluginError
            As `backend_config`, for one of ``backends``.
        """
        values = self.settings.model_dump(exclude={"backends"})
        tables: dict[str, Any] = dict(self.settings.backends)
        problems: list[Problem] = []
        required: set[tuple[str, ...]] = set()
        named_here = self._named()
        for name in backends:
            spec = self._manager.describe(name)
            try:
                config, wrong = self._check(spec)
            except PluginError:
                if name in named_here:
                    raise
                config, wrong = None, []
            if config is None and name not in named_here:
                model = model_of(self._manager.config_kind(spec))
                needed = [key for key, field in model.model_fields.items() if field.is_required()]
                required |= {("backends", name, key) for key in needed}
                tables[name] = dict.fromkeys(needed) | model.model_construct().model_dump(warnings=False)
            elif config is None:
                problems.extend(wrong)
            else:
                tables[name] = config.model_dump()
        if problems:
            raise as_error(problems)
        leaves = [*flatten(values, ""), *flatten(dict(sorted(tables.items())), "", ("backends",))]
        return [
            (
                ".".join(path),
                HIDDEN if is_secret(path) and value is not None else value,
                REQUIRED if path in required else self._merged.origin(path),
            )
            for path, value, _ in leaves
        ]

    def _named(self) -> set[str]:
        """Return the backends that the configuration names: the chosen one, its parts, and those that have a table."""
        found: set[str] = set(self.settings.backends)
        seen: set[str] = set()
        waiting = [self.settings.backend]
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self._manager.names():
                continue
            seen.add(name)
            with contextlib.suppress(PluginError):  # the description of the plugin reports it
                spec = self._manager.describe(name)
                config, _ = self._check(spec)
                waiting += [] if config is None else _parts(spec, self._own(spec, config)).values()
        return found | seen


def _parts(spec: BackendSpec, config: Any) -> Mapping[str, str]:
    """Return the backends that a backend is composed of, by their keys."""
    try:
        return {} if spec.parts is None else spec.parts(config)
    except Exception as error:
        raise PluginError(f"the backend {spec.name!r} raised {named(error)} when it should name its parts") from error


def load(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    manager: PluginManager | None = None,
) -> Resolved:
    """Read the configuration from everywhere, and check all of it but the tables of backends.

    Parameters
    ----------
    config
        A TOML file, or a mapping in place of one. By default the file that ``ONEACCORD_CONFIG`` names, else
        ``oneaccord.toml``, else ``[tool.oneaccord]`` of ``pyproject.toml``, both in ``directory``.
    arguments
        The caller's values, as nested mappings; they override everything else. Values of None are left out.
    environ
        The environment; by default that of the process.
    directory
        The folder in which files are looked for; by default the working directory.
    manager
        The plugin manager that knows the backends; by default that of the process. The switches under ``plugins`` are
        applied to it.

    Returns
    -------
    Resolved
        Values and origins.

    Raises
    ------
    ConfigError
        A file is missing or no TOML, a key or a variable is unknown, a value is not allowed, or a backend is not installed.
        The message has one line for each problem; the attributes ``file``, ``key`` and ``value`` are those of the first.
    PluginError
        A module that ``plugins`` names cannot be loaded.
    """
    environ = os.environ if environ is None else environ
    manager = get_plugin_manager() if manager is None else manager
    file, below = _base_layer(config, environ, here() if directory is None else Path(directory))
    from_environment, problems = read_environment(environ, list(Settings.model_fields), TABLES)
    from_arguments = [leaf for leaf in flatten(arguments or {}, ARGUMENT) if leaf[1] is not None]
    merged = merge([below, _with_backend_names(from_environment, manager), from_arguments])
    settings, wrong = _validated(Settings, merged, merged.tree)
    problems.extend(wrong)
    words = merged.tree.get("plugins", [])
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        manager.switch(words)
    broken: PluginError | None = None
    try:
        problems.extend(_check_names(merged, manager))
    except PluginError as error:
        broken = error
    if settings is not None and settings.selection is not None:
        from oneaccord.config.select import read_table

        try:
            read_table(settings.selection)
        except ConfigError as error:
            problems.append(problem(merged, ("selection",), str(settings.selection), str(error)))
    if broken is not None:
        if not problems:
            raise broken
        problems.append(Problem(str(broken)))
    if problems or settings is None:
        raise as_error([*problems, *_check_tables(merged, manager)])
    return Resolved(settings, file, merged, manager)


def _base_layer(
    config: str | os.PathLike[str] | Mapping[str, Any] | None, environ: Mapping[str, str], directory: Path
) -> tuple[Path | None, list[Leaf]]:
    """Return the file that was read and its leaves, or those of a mapping in its place."""
    given: object = config
    if isinstance(given, Mapping):
        return None, list(flatten(given, MAPPING))
    if given is not None and not isinstance(given, str | os.PathLike):
        raise ConfigError(
            f"config must be the path of a TOML file or a mapping, not {given!r}",
            file=ARGUMENT,
            key="config",
            value=given,
        )
    path = find_file(environ, directory) if given is None else directory / Path(given).expanduser()
    return path, [] if path is None else list(flatten(read_file(path), str(path)))


def _with_backend_names(leaves: list[Leaf], manager: PluginManager) -> list[Leaf]:
    """Give backends their own spelling: a variable's name has neither small letters nor dashes."""
    if not any(path[0] == "backends" for path, _, _ in leaves):
        return leaves
    try:
        spelling = {name.lower().replace("-", "_"): name for name in manager.installed_names()}
    except PluginError:  # a module that a switch names: reported when the names are checked, with all other errors
        return leaves
    return [
        ((path[0], spelling.get(path[1], path[1]), *path[2:]), value, origin)
        if path[0] == "backends" and len(path) > 1
        else (path, value, origin)
        for path, value, origin in leaves
    ]


def _check_names(merged: Merged, manager: PluginManager) -> list[Problem]:
    """Check the names of backends and collectives, by what is installed; nothing is imported for it."""
    problems = []
    backend = merged.tree.get("backend", "auto")
    if isinstance(backend, str) and backend != "auto" and backend not in manager.names():
        problems.append(replace(problem(merged, ("backend",), backend, manager.unknown_text(backend)), unknown_backend=True))
    for name, table in _table(merged, "backends").items():
        if name not in manager.installed_names():
            found = problem(merged, ("backends", name), table, manager.unknown_text(name))
            problems.append(replace(found, unknown_backend=True))
    for name, algorithm in _table(merged, "algorithms").items():
        from oneaccord.schedule.steps import Collective

        collectives = [collective.value for collective in Collective]
        if name not in collectives:
            text = f"there is no collective {name!r}{did_you_mean(name, collectives, 'algorithms.')}"
            problems.append(problem(merged, ("algorithms", name), algorithm, text))
    return problems


def _check_tables(merged: Merged, manager: PluginManager) -> Iterator[Problem]:
    """Check the tables of backends if something else is wrong already, so that one error reports everything; their plugins are described."""
    for name, table in _table(merged, "backends").items():
        with contextlib.suppress(PluginError):  # the choice of the backend reports it
            yield from _check_table(manager.config_kind(manager.describe(name)), name, table, merged)[1]


def _check_table(kind: type[object], name: str, table: object, merged: Merged) -> tuple[BaseModel | None, list[Problem]]:
    """Return the table of a backend as its model, or its problems."""
    try:
        return _validated(model_of(kind), merged, table, ("backends", name))
    except Exception as error:
        raise PluginError(f"the backend {name!r} raised {named(error)} while its table was checked") from error


def _validated(
    model: type[Model], merged: Merged, table: object, above: tuple[str, ...] = ()
) -> tuple[Model | None, list[Problem]]:
    """Return the table at ``above`` as a model, or its problems."""
    try:
        return model.model_validate(table), []
    except ValidationError as error:  # not chained: pydantic's own text repeats the values, secrets included
        return None, from_validation(error, model, merged, above)


def _table(merged: Merged, key: str) -> dict[str, Any]:
    """Return a table of the raw values; empty if another value stands there, which the model has refused."""
    table = merged.tree.get(key)
    return table if isinstance(table, dict) else {}
