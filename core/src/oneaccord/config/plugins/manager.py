"""The plugin manager: the second and third tier of discovery, and a typed wrapper around every hook call."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pluggy

from oneaccord.common.bounded import Stuck, bounded
from oneaccord.config.plugins.installed import (
    BACKEND_GROUP,
    EXTENSION_GROUP,
    InstalledPlugin,
    Switches,
    nearest,
    switch_against,
    unknown_backend_text,
    why_left_out,
)
from oneaccord.config.plugins.loading import (
    IN_PROCESS,
    PROBE_S,
    Description,
    checked_kind,
    config_kind,
    import_plugin,
    installed,
    load,
    logger,
    named,
    owner,
    probed,
    whose,
)
from oneaccord.config.plugins.specs import check_spec
from oneaccord.contract import hookspecs
from oneaccord.contract.backend import Backend, BackendSpec, Bootstrap, LaunchRequest
from oneaccord.errors import DeadlineError, DuplicatePluginError, OneAccordError, PluginError, UnknownBackendError

if TYPE_CHECKING:
    from oneaccord.contract.backend import CollectiveRequest, NativeCollective
    from oneaccord.contract.observe import OperationEvent
    from oneaccord.schedule.algorithms.registry import Algorithm

__all__ = ["Description", "PluginManager", "get_plugin_manager"]

_STARTED: Final[str] = "oneaccord_collective_started"
_FINISHED: Final[str] = "oneaccord_collective_finished"


class PluginManager:
    """Finds plugins, imports no more of them than it must, and calls their hooks.

    Safe to use from several threads.

    Parameters
    ----------
    switches
        Which plugins to load and which to block; by default all that are installed count.

    Attributes
    ----------
    settled
        Whether all extensions are loaded; if not, `load_extensions` does that. The next two are final then, until a switch is added.
    observed
        Whether there are observers.
    performs
        Whether a plugin may perform collectives natively.
    """

    def __init__(self, switches: Switches | None = None) -> None:
        self._switches = switches if switches is not None else Switches()
        self._lock = threading.RLock()
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        if self._switches.trace:
            self._pluggy.trace.root.setwriter(sys.stderr.write)
            self._pluggy.enable_tracing()
        self._registered: dict[str, tuple[InstalledPlugin, BackendSpec]] = {}
        self._described: dict[str, BackendSpec] = {}
        self._stuck: dict[str, str] = {}
        self._extras: set[str] = set()
        self._extensions_loaded = False
        self._extension_errors: dict[str, PluginError] = {}
        self._asked: set[str] = set()
        self._algorithms: dict[tuple[str, str], Algorithm] = {}
        self._refused: dict[tuple[str, str], str] = {}
        self._observers: dict[str, list[tuple[str, Callable[..., Any]]]] = {_STARTED: [], _FINISHED: []}
        self.settled: bool = False
        self.observed: bool = False
        self.performs: bool = False
        self._complained: set[tuple[str, str]] = set()

    # ------------------------------------------------------------------ tier 1: list

    @property
    def switches(self) -> Switches:
        """Which plugins are loaded and blocked."""
        return self._switches

    def switch(self, words: Iterable[str]) -> None:
        """Add switches: ``"NAME"`` loads a plugin or a module, ``"no:NAME"`` blocks one. Repeating them changes nothing.

        A plugin that was loaded before it is blocked stays loaded; its backends can no longer be chosen.
        """
        with self._lock:
            self._switches = self._switches.with_words(words)
            self.settled = False

    def block_broken(self) -> dict[str, PluginError]:
        """Block the plugins and modules that a switch names and that cannot be loaded; return their errors, by name.

        For callers that report what is there, and continue; all other callers get the error, because they need the plugin.
        """
        broken: dict[str, PluginError] = {}
        with self._lock:
            for name in self._switches.load:
                try:
                    self._load_extra(name)
                except PluginError as error:
                    broken[name] = error
            self.switch(f"no:{name}" for name in broken)
        return broken

    def names(self) -> list[str]:
        """Return the names of all backends that count, sorted; imports nothing but the modules that a switch names."""
        return sorted({plugin.name for plugin in self.entries()})

    def entries(self) -> list[InstalledPlugin]:
        """Return every backend that counts, duplicates included, sorted by name.

        Raises
        ------
        PluginError
            A module that a switch names cannot be imported.
        """
        self._load_extras()
        with self._lock:
            registered = [plugin for plugin, _ in self._registered.values() if not self._switches.blocks(plugin)]
        counting = [plugin for plugin in installed(BACKEND_GROUP) if self._switches.allows(plugin)]
        return sorted([*counting, *registered], key=lambda plugin: plugin.name)

    def installed_names(self) -> set[str]:
        """Return the names of all backends that are there, those that the switches leave out included."""
        self._load_extras()
        return {plugin.name for plugin in installed(BACKEND_GROUP)} | set(self._registered)

    def unknown_text(self, name: str) -> str:
        """Return words for messages: the backend ``name`` does not count, the backends that do, and the remedy."""
        names = self.names()
        return unknown_backend_text(name, names, self._switches, dict(self.why_left_out()))

    # -------------------------------------------------------------- tier 2: describe

    def describe(self, name: str) -> BackendSpec:
        """Import the plugin of the backend ``name``, and no other, and return its description of itself.

        Raises
        ------
        UnknownBackendError
            No plugin has that name, or a switch blocks it.
        DuplicatePluginError
            Two plugins have that name.
        ApiVersionError
            The plugin was built for another version of the contract.
        PluginError
            The plugin raises on import, or does not register what it should; chained to its exception.
        """
        found = [plugin for plugin in self.entries() if plugin.name == name]
        if not found:
            raise UnknownBackendError(self.unknown_text(name))
        if len(found) > 1:
            owners = " and ".join(f"{plugin.distribution} {plugin.version} ({plugin.value})" for plugin in found)
            raise DuplicatePluginError(
                f"the backend {name!r} is provided more than once, by {owners}; uninstall all but one of them, or leave one out by its "
                f"distribution or module, as in plugins = ['no:{found[0].distribution}']"
            )
        with self._lock:
            if name in self._registered:
                return self._registered[name][1]
            if name not in self._described:
                self._described[name] = self._describe_installed(found[0])
            return self._described[name]

    def describe_all(self) -> list[Description]:
        """Describe every backend that counts, each name once; one that cannot be described is recorded with its error."""
        descriptions = []
        first = {plugin.name: plugin for plugin in reversed(self.entries())}
        for _, plugin in sorted(first.items()):
            try:
                descriptions.append(Description(plugin, spec=self.describe(plugin.name)))
            except PluginError as error:
                descriptions.append(Description(plugin, error=error))
        return descriptions

    def available(self, name: str) -> str | None:
        """Return None when the backend ``name`` can run here, else the reason in words.

        Raises
        ------
        UnknownBackendError
            No plugin has that name.
        """
        try:
            spec = self.describe(name)
        except UnknownBackendError:
            raise
        except PluginError as error:
            return str(error)
        if name not in self._stuck:
            try:
                return probed(spec)
            except Stuck:  # a probe that did not return once is not waited for again
                self._stuck[name] = f"its probe did not return within {PROBE_S:g} s"
        return self._stuck[name]

    def register(self, plugin: object, name: str) -> None:
        """Register a plugin of this process, without an entry point; its backends count as installed ones do.

        Raises
        ------
        DuplicatePluginError
            One of its backends has the name of one that is already there; nothing is registered then.
        PluginError
            It has a wrong implementation of a hook, or does not register what it should; nothing is registered then.
        """
        with self._lock:
            entry = InstalledPlugin(name, IN_PROCESS, "", name)
            self._add(plugin, entry)
            try:
                self._adopt(plugin, entry)
            except BaseException:
                self._remove(plugin)
                raise

    # ---------------------------------------------------------------- tier 3: create

    def load_factory(self, spec: BackendSpec) -> Callable[[Bootstrap], Backend]:
        """Import the factory of a backend.

        Raises
        ------
        BackendUnavailableError
            Its module cannot be imported; the message says what to type.
        PluginError
            ``spec.factory`` names nothing that can be called.
        """
        factory: Callable[[Bootstrap], Backend] = load(spec, "factory", self._plugin_of(spec))
        return factory

    def config_kind(self, spec: BackendSpec) -> type[object]:
        """Return the class of a backend's config; it is imported if the spec names it.

        Raises
        ------
        BackendUnavailableError
            Its module cannot be imported.
        PluginError
            ``spec.config`` names no class of configs.
        """
        return config_kind(spec, self._plugin_of(spec))

    def create(self, spec: BackendSpec, bootstrap: Bootstrap, grace_s: float) -> Backend:
        """Make a backend, in a thread that can be left behind; ``grace_s`` is how long after its deadline it is given up.

        Raises
        ------
        PluginError
            The factory cannot be called, does not return, or returns no `Backend`. Its own errors pass through.
        """
        factory = self.load_factory(spec)
        name = f"the factory {spec.factory!r} of {self.whose(spec)}"
        try:
            if bootstrap.runtime.is_simulated or "calling thread" in spec.capabilities:
                backend = factory(bootstrap)
            else:
                seconds = bootstrap.deadline.remaining() + grace_s
                backend = bounded(lambda: factory(bootstrap), seconds, f"oneaccord-{spec.name}-factory", _discard)
        except Stuck:
            raise PluginError(
                f"{name} did not return within {bootstrap.deadline.timeout_s:g} s, the time in which the ranks must be ready; "
                f"choose another backend, or leave this one out by plugins = ['no:{spec.name}']"
            ) from None
        except Exception as error:
            # A rank that hangs in its factory is missed by those that wait for it in theirs.
            if not isinstance(error, OneAccordError) or isinstance(error, DeadlineError):
                error.add_note(f"raised in {name}")
            raise
        return checked_kind(backend, Backend, name)

    def load_launcher(self, spec: BackendSpec) -> Callable[[LaunchRequest], int] | None:
        """Import the launcher of a backend; None when ranks are processes started by ``oneaccord run``.

        Raises as `load_factory` does.
        """
        if spec.launcher is None:
            return None
        launcher: Callable[[LaunchRequest], int] = load(spec, "launcher", self._plugin_of(spec))
        return launcher

    def load_diagnosis(self, spec: BackendSpec) -> Callable[[], Iterable[tuple[object, object]]]:
        """Import the function that describes a backend for ``oneaccord doctor``. Raises as `load_factory` does."""
        diagnosis: Callable[[], Iterable[tuple[object, object]]] = load(spec, "diagnose", self._plugin_of(spec))
        return diagnosis

    def whose(self, spec: BackendSpec) -> str:
        """Return words for a backend and its distribution, for messages."""
        return whose(spec.name, self._plugin_of(spec))

    def _plugin_of(self, spec: BackendSpec) -> InstalledPlugin:
        registered = self._registered.get(spec.name)
        found = [plugin for plugin in installed(BACKEND_GROUP) if plugin.name == spec.name]
        return registered[0] if registered else next(iter(found), InstalledPlugin(spec.name, IN_PROCESS, "", spec.name))

    # ------------------------------------------------------------- hooks beyond backends

    def algorithms(self) -> list[Algorithm]:
        """Return the algorithms of all loaded plugins and extensions that the verifier has proved right.

        Each plugin is asked once, and each algorithm proved once, in a few small worlds. A plugin that raises, and an algorithm
        that is wrong or has a name that is taken, is recorded, logged and left out; see `refused_algorithms`.
        """
        self.load_extensions()
        with self._lock:
            for name, call in self._callers("oneaccord_register_algorithms"):
                if name not in self._asked:
                    self._asked.add(name)
                    self._take_algorithms(name, call)
            return list(self._algorithms.values())

    def refused_algorithms(self) -> dict[tuple[str, str], str]:
        """Return why algorithms of plugins were left out, by the names of the collective and of the algorithm."""
        self.algorithms()
        return dict(self._refused)

    def native_collective(self, request: CollectiveRequest) -> NativeCollective | None:
        """Find the plugin that performs this kind of call natively; None leaves it to the engine. Not remembered here.

        Raises
        ------
        PluginError
            A plugin raised, or returned an object that cannot be called; core cannot skip it, because the other ranks may already rely on its collective.
        """
        self.load_extensions()
        try:
            native: NativeCollective | None = self._pluggy.hook.oneaccord_collective(request=request)
        except Exception as error:
            raise PluginError(
                f"a plugin raised {named(error)} when it should say whether it performs {request.collective.value} on the "
                f"backend {request.backend!r}"
            ) from error
        if native is not None and not callable(native):
            raise PluginError(
                f"a plugin returned {native!r} when it should say whether it performs {request.collective.value} on the backend "
                f"{request.backend!r}; expected a function or None"
            )
        return native

    def notify_started(self, event: OperationEvent) -> None:
        """Inform every observer that an operation starts; an observer that raises is logged once and breaks nothing."""
        self._notify(_STARTED, event)

    def notify_finished(self, event: OperationEvent) -> None:
        """Inform every observer that an operation ended; an observer that raises is logged once and breaks nothing."""
        self._notify(_FINISHED, event)

    def extensions(self) -> list[InstalledPlugin]:
        """Return the installed extensions that count; imports none of them."""
        return [plugin for plugin in installed(EXTENSION_GROUP) if self._switches.allows(plugin)]

    def extension_errors(self) -> dict[str, PluginError]:
        """Return the errors of extensions so far, by name; for it, their algorithms are proved."""
        self.algorithms()
        return dict(self._extension_errors)

    def load_extensions(self) -> None:
        """Import every extension that counts, once; one that cannot be imported is recorded and logged.

        Raises
        ------
        PluginError
            A module that a switch names cannot be imported: the user wants that one.
        """
        if self.settled:
            return
        with self._lock:
            self._load_extras()
            if not self._extensions_loaded:
                self._load_extensions_once()
            self.settled = True

    # ----------------------------------------------------------------------- within

    def _load_extensions_once(self) -> None:
        for plugin in self.extensions():
            try:
                self._import_and_adopt(plugin)
            except PluginError as error:
                self._record_extension_error(plugin.name, error, "cannot be loaded")
        self._extensions_loaded = True

    def _load_extras(self) -> None:
        """Load the modules that the switches name and that are no entry point of a backend, which loads when asked for."""
        if self._extras.issuperset(self._switches.load):
            return
        with self._lock:
            for name in self._switches.load:
                self._load_extra(name)

    def _load_extra(self, name: str) -> None:
        if name in self._extras:
            return
        if all(plugin.name != name for plugin in installed(BACKEND_GROUP)):
            extensions = {plugin.name: plugin for plugin in installed(EXTENSION_GROUP)}
            self._import_and_adopt(extensions.get(name, InstalledPlugin(name, IN_PROCESS, "", name, EXTENSION_GROUP)))
        self._extras.add(name)

    def _import_and_adopt(self, plugin: InstalledPlugin) -> None:
        """Import an extension, register its hooks, and count its backends as registered ones."""
        module = import_plugin(plugin)
        if self._pluggy.is_registered(module):
            return
        self._add(module, plugin)
        try:
            self._adopt(module, plugin)
        except BaseException:
            self._remove(module)
            raise

    def _describe_installed(self, plugin: InstalledPlugin) -> BackendSpec:
        module = import_plugin(plugin)
        if not self._pluggy.is_registered(module):
            self._add(module, plugin)
        specs = self._specs_of(module, plugin)
        for spec in specs:
            if spec.name == plugin.name:
                check_spec(spec, plugin, owner(plugin))
                return spec
        listed = ", ".join(repr(spec.name) for spec in specs) or "no backend"
        raise PluginError(
            f"{owner(plugin)} registers {listed}, and its entry point is named {plugin.name!r}: the two must be equal"
        )

    def _adopt(self, module: object, plugin: InstalledPlugin) -> None:
        """Count the backends that a plugin without an entry point of its own brings."""
        taken = {other.name: other for other in installed(BACKEND_GROUP) if self._switches.allows(other)}
        taken.update({other: entry for other, (entry, _) in self._registered.items()})
        specs = self._specs_of(module, plugin, required=False)
        for spec in specs:
            check_spec(spec, plugin, owner(plugin))
            if spec.name in taken:
                raise DuplicatePluginError(
                    f"{owner(plugin)} registers the backend {spec.name!r}, which {owner(taken[spec.name])} provides "
                    f"already; leave that one out by {switch_against(taken[spec.name], plugin)}, or choose another name"
                )
        for spec in specs:
            entry = InstalledPlugin(spec.name, plugin.distribution, plugin.version, plugin.value)
            self._registered[spec.name] = (entry, spec)

    def why_left_out(self) -> list[tuple[str, str]]:
        """Return the backends that are installed and do not count, each with the reason."""
        counting = set(self.names())
        return why_left_out([plugin for plugin in installed(BACKEND_GROUP) if plugin.name not in counting], self._switches)

    def _specs_of(self, module: object, plugin: InstalledPlugin, *, required: bool = True) -> list[BackendSpec]:
        """Call ``oneaccord_register_backends`` of one plugin, and of no other."""
        callers = [call for _, call in self._callers("oneaccord_register_backends", only=module)]
        if not callers:
            if required:
                raise PluginError(f"{owner(plugin)} does not implement oneaccord_register_backends; did it forget @hookimpl?")
            return []
        try:
            results: list[object] = callers[0]()
        except Exception as error:
            raise PluginError(f"{owner(plugin)} raised {named(error)} while it described its backends") from error
        specs: list[BackendSpec] = []
        for result in results:
            for spec in result if isinstance(result, Sequence) else [result]:
                if not isinstance(spec, BackendSpec):
                    raise PluginError(f"{owner(plugin)} registers {spec!r}, which is not a BackendSpec")
                specs.append(spec)
        return specs

    def _add(self, plugin: object, entry: InstalledPlugin) -> None:
        """Register the hooks of a plugin with pluggy; leave no trace when one of them is wrong."""
        unique = entry.name
        while self._pluggy.has_plugin(unique):  # a backend and an extension may share their name
            unique += "'"
        try:
            self._pluggy.register(plugin, unique)
        except (pluggy.PluginValidationError, ValueError) as error:
            self._remove(plugin)
            raise PluginError(f"{owner(entry)} has a wrong implementation of a hook: {error}") from error
        for caller in self._pluggy.get_hookcallers(plugin) or []:
            if not caller.has_spec():
                self._remove(plugin)
                known = [hook for hook in hookspecs.__all__ if hook.startswith("oneaccord_")]
                suggestion = nearest(caller.name, known)
                raise PluginError(
                    f"{owner(entry)} implements {caller.name!r}, which is not a hook of oneaccord; "
                    f"did it mean {suggestion!r}? The hooks are {', '.join(known)}"
                )
        self._refresh_hooks()

    def _remove(self, plugin: object) -> None:
        if self._pluggy.is_registered(plugin):
            self._pluggy.unregister(plugin)
            self._refresh_hooks()

    def _refresh_hooks(self) -> None:
        self._observers = {hook: self._callers(hook) for hook in (_STARTED, _FINISHED)}
        self.observed = any(self._observers.values())
        self.performs = bool(self._pluggy.hook.oneaccord_collective.get_hookimpls())

    def _callers(self, hook: str, only: object | None = None) -> list[tuple[str, Callable[..., Any]]]:
        """Return a caller of ``hook`` for each plugin that implements it, so that each can fail alone."""
        everyone = self._pluggy.get_plugins()
        implementing = [impl.plugin for impl in getattr(self._pluggy.hook, hook).get_hookimpls()]
        return [
            (
                self._pluggy.get_name(plugin) or repr(plugin),
                self._pluggy.subset_hook_caller(hook, [other for other in everyone if other is not plugin]),
            )
            for plugin in dict.fromkeys(implementing)
            if only is None or plugin is only
        ]

    def _take_algorithms(self, name: str, call: Callable[..., Any]) -> None:
        """Ask one plugin for its algorithms, and take those that are right."""
        try:
            offered = [algorithm for algorithms in call() for algorithm in algorithms]
        except Exception as error:  # noqa: BLE001 - an extension is optional, and its error is recorded
            self._record_extension_error(name, error, "raised while it registered its algorithms")
            return
        if not offered:
            return
        # Imported here: only plugins with algorithms need the verifier.
        from oneaccord.config.plugins.proving import sort_out

        right, wrong = sort_out(offered, self._algorithms)
        self._algorithms |= right
        self._refused |= {key: str(error) for key, error in wrong.items() if key not in self._algorithms}
        if wrong:
            lines = [
                f"the plugin {name!r} registers the algorithm {algorithm!r} for {collective}, which is refused: {error}"
                for (collective, algorithm), error in wrong.items()
            ]
            refusal = PluginError("\n".join(lines))
            refusal.__cause__ = next(iter(wrong.values()))
            self._record_extension_error(name, refusal, "registers a wrong algorithm")

    def _notify(self, hook: str, event: OperationEvent) -> None:
        for name, call in self._observers[hook]:
            try:
                call(event=event)
            except Exception:  # noqa: BLE001 - no observer may break a collective that other ranks wait for
                if (name, hook) not in self._complained:
                    self._complained.add((name, hook))
                    logger().warning("the observer %r raised in %s; its later errors go unlogged", name, hook, exc_info=True)

    def _record_extension_error(self, name: str, error: Exception, what: str) -> None:
        if name not in self._extension_errors:
            known = error if isinstance(error, PluginError) else PluginError(f"the extension {name!r} {what}: {named(error)}")
            self._extension_errors[name] = known
            logger().warning("the extension %r %s: %s", name, what, error)


def _discard(backend: object) -> None:
    """Give back the result of a factory that came after nothing waited for it any more."""
    if isinstance(backend, Backend):
        with contextlib.suppress(Exception):
            backend.abort()
            backend.close()


# One manager for the process, made by one thread even when the ranks are threads that all ask at once.
_making = threading.Lock()


@functools.cache
def _process_manager() -> PluginManager:
    return PluginManager(Switches.from_environment(os.environ))


def get_plugin_manager() -> PluginManager:
    """Return the plugin manager of this process, with the switches of its environment."""
    with _making:
        return _process_manager()
