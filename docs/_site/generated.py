"""What the site makes from the code: a page that has the line ``<!-- generated: NAME -->`` gets the Markdown of that name there.

Nothing of it is written into docs/: the command line speaks through its own help, settings through their models, errors, variables and the
programming interface through their docstrings.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

from sphinx.ext.autodoc.mock import mock

MARK: Final = re.compile(r"^<!-- generated: ([\w.-]+) -->$", re.MULTILINE)
PACKAGES: Final = ("oneaccord", "oneaccord.api", "oneaccord_parallel")
"""The public packages, in the order in which a name that stands alone is looked for."""

# The sections of the page of the plugin API: the modules of core whose names each has, and words. The last one takes the rest.
API_SECTIONS: Final[dict[str, tuple[str, str]]] = {
    "A backend": (
        "contract.spec contract.config contract.backend contract.transport contract.deadline common.installing config",
        "",
    ),
    "Cards": ("contract.cards control.cards", "What ranks say to each other before they begin. See `Bootstrap.exchange`."),
    "Foreign libraries": (
        "kit",
        "For a backend over a library that moves the bytes itself: [A backend](../guides/plugins-backend.md#over-a-foreign-library).",
    ),
    "Memory of GPUs": ("contract.device", "See `Backend.open_device`."),
    "Hooks": ("contract.hookspecs contract.observe", ""),
    "Algorithms": ("schedule.steps schedule.algorithms", "See `oneaccord_register_algorithms`."),
    "Launchers": (
        "launch contract.launcher contract.workers engines",
        "For ranks on other hosts, or in the workers of an engine.",
    ),
    "Records of calls": (
        "timeline control.recorder",
        "What the flight recorder keeps, and what a trace consists of.",
    ),
    "Networks of simulated worlds": ("schedule.simulation", ""),
    "Small helpers": ("common local group contract.seal", "What core does for itself, and plugins need as well."),
    "Worlds of threads, and simulated ones": (
        "",
        "For a backend whose ranks are threads, or live in a world with a clock of its own. The plugin simulated uses it.",
    ),
}


def public_names(package: ModuleType) -> dict[str, Any]:
    """Return what a package exports, without its modules."""
    names = {name: getattr(package, name) for name in package.__all__ if not name.startswith("__")}
    return {name: thing for name, thing in names.items() if not inspect.ismodule(thing)}


def directive(path: str, thing: Any) -> str:
    """Return the directive by which Sphinx describes a thing."""
    if inspect.isclass(thing):
        kind, more = (
            "autoexception" if issubclass(thing, BaseException) else "autoclass",
            ["   :members:", "   :show-inheritance:"],
        )
        if not issubclass(thing, (BaseException, str, int, dict)) and "pydantic" not in type(thing).__module__:
            more.append("   :inherited-members:")
    else:
        kind, more = "autofunction" if inspect.isroutine(thing) else "autodata", []
    return "\n".join([f".. {kind}:: {path}", *more, ""])


def section(heading: str, path: str, things: dict[str, Any], words: str = "") -> Iterator[str]:
    """Yield a section of a page: functions, classes and constants, and errors at its end."""
    yield f"## {heading}\n"
    if words:
        yield f"{words}\n"
    errors = {name: thing for name, thing in things.items() if inspect.isclass(thing) and issubclass(thing, BaseException)}
    others = sorted(things.keys() - errors.keys(), key=lambda name: (inspect.isclass(things[name]), name.lower()))
    for heading_of, names in (("", others), ("Errors and warnings", sorted(errors))):
        if not names:
            continue
        if heading_of:
            yield f"### {heading_of}\n"
        for name in names:
            yield "\n".join(["```{eval-rst}", directive(f"{path}.{name}", things[name]), "```", ""])


def api(package: str) -> Iterator[str]:
    """Yield the page of a public package."""
    module = importlib.import_module(package)
    if package == "oneaccord.api":
        yield from plugin_api(module)
        return
    yield f"```{{eval-rst}}\n.. py:module:: {package}\n```\n"
    yield from section(package, package, public_names(module))
    for name in sorted(getattr(module, "_MODULES", ())):
        inner = importlib.import_module(f"{package}.{name}")
        yield from modules(inner)


def modules(module: ModuleType) -> Iterator[str]:
    """Yield the sections of a module that a package exports as such, and of the modules in it."""
    path = module.__name__
    yield f"```{{eval-rst}}\n.. py:module:: {path}\n```\n"
    yield from section(path, path, public_names(module), (inspect.getdoc(module) or "").partition("\n\n")[0])
    for name in module.__all__:
        if inspect.ismodule(getattr(module, name)):
            yield from modules(getattr(module, name))


def plugin_api(module: ModuleType) -> Iterator[str]:
    """Yield the page of what plugins may import; what programs use as well has its place on their page."""
    core = set(importlib.import_module("oneaccord").__all__)
    left = {name: thing for name, thing in public_names(module).items() if name not in core}
    homes = {
        name: _ORIGINAL.get(f"oneaccord.api.{name}") or getattr(thing, "__module__", None) or "" for name, thing in left.items()
    }
    homes |= {name: home for name, home in _homes_of_constants(left).items() if not homes[name].startswith("oneaccord.")}
    yield "```{eval-rst}\n.. py:module:: oneaccord.api\n```\n"
    for heading, (places, words) in API_SECTIONS.items():
        starts = tuple(f"oneaccord.{place}" for place in places.split())
        taken = {name: thing for name, thing in left.items() if not starts or homes[name].startswith(starts)}
        left = {name: thing for name, thing in left.items() if name not in taken}
        yield from section(heading, "oneaccord.api", taken, words)
        if heading == "Hooks":
            hooks = importlib.import_module("oneaccord.contract.hookspecs")
            for name in [name for name in hooks.__all__ if name.startswith("oneaccord_")]:
                yield f"```{{eval-rst}}\n.. autofunction:: oneaccord.contract.hookspecs.{name}\n```\n"


_ORIGINAL: dict[str, str] = {}
"""The module in which each public name is defined, which `show_public_paths` replaces."""


def _homes_of_constants(names: dict[str, Any]) -> dict[str, str]:
    """Return the modules of constants, as the source of `oneaccord.api` imports them."""
    source = inspect.getsource(importlib.import_module("oneaccord.api"))
    found = {}
    for module, imported in re.findall(r"^from ([\w.]+) import (\([^)]*\)|.*)$", source, re.MULTILINE):
        found |= {name: module for name in re.findall(r"\w+", imported) if name in names}
    return found


def errors(_name: str = "") -> Iterator[str]:
    """Yield all errors of oneaccord, with what their docstrings say."""
    module = importlib.import_module("oneaccord.errors")
    yield "| error | is a | meaning |\n|---|---|---|"
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) and issubclass(thing, (Exception, Warning)):
            bases = ", ".join(f"`{base.__name__}`" for base in thing.__bases__)
            link = f"{{py:exc}}`~oneaccord.{name}`" if hasattr(importlib.import_module("oneaccord"), name) else f"`{name}`"
            yield f"| {link} | {bases} | {one_line(inspect.getdoc(thing) or '')} |"
    yield ""


def one_line(words: str) -> str:
    """Return the first paragraph of a docstring as the Markdown of a table's cell."""
    return " ".join(words.partition("\n\n")[0].split()).replace("``", "`").replace("|", r"\|")


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all commands, each after the one that it belongs to."""
    typer_main = importlib.import_module("typer.main")
    root = typer_main.get_command(importlib.import_module("oneaccord.cli.app").make_app(["--help"]))

    def walk(group: Any, before: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for name, command in group.commands.items():
            path = (*before, *name.split())
            yield path, command
            if hasattr(command, "commands"):
                yield from walk(command, path)

    yield from sorted(walk(root, ()), key=lambda found: found[0])


def command_line(_name: str = "") -> Iterator[str]:
    """Yield the help of each command."""
    yield f"```console\n$ oneaccord --help\n{help_of(())}\n```\n"
    for path, _command in commands():
        yield f"## oneaccord {' '.join(path)}\n\n```console\n$ oneaccord {' '.join(path)} --help\n{help_of(path)}\n```\n"


def help_of(path: tuple[str, ...]) -> str:
    """Return what a command prints with ``--help``, at a width that fits a page."""
    main = importlib.import_module("oneaccord.cli.main").main
    os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = "80"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*path, "--help"])
    return printed.getvalue().strip()


def settings(_name: str = "") -> Iterator[str]:
    """Yield the tables of all settings, from the schema of the file."""
    manager = importlib.import_module("oneaccord.config.plugins").get_plugin_manager()
    schema = importlib.import_module("oneaccord.config").json_schema(manager)
    properties = schema["properties"]
    tables = {key: value for key, value in properties.items() if key != "backends" and _model(value, schema)}
    top = {key: value for key, value in properties.items() if key not in {*tables, "backends"}}
    yield from _settings("At the top", "", {"properties": top}, schema)
    for key, value in tables.items():
        model = _model(value, schema)
        yield from _settings(f"`[{key}]`", model.get("description", "").partition(": ")[2].capitalize(), model, schema)
    for name, table in sorted(properties["backends"]["properties"].items()):
        if table.get("properties"):
            yield from _settings(f"`[backends.{name}]`", "", table, schema)


def _model(value: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a table with keys of its own, {} for anything else."""
    place = value.get("$ref", "").removeprefix("#/$defs/")
    found = schema["$defs"].get(place, {})
    return found if "properties" in found else {}


def _settings(heading: str, words: str, table: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {heading}\n"
    if words:
        yield f"{words.replace('``', '`')}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    required = table.get("required", ())
    for key, value in table["properties"].items():
        # A default that a function makes, as of a list or a table, is not in the schema: it is empty.
        default = f"`{_toml(value['default'])}`" if value.get("default") is not None else "required" if key in required else ""
        yield f"| `{key}` | {_type(value, schema)} | {default} | {one_line(value.get('description', ''))} |"
    yield ""


def _toml(value: Any) -> str:
    return (
        {True: "true", False: "false"}[value]
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


def _type(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the type of a setting in words, with its bounds."""
    if "$ref" in value:
        return _type(schema["$defs"].get(value["$ref"].removeprefix("#/$defs/"), {}), schema)
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(each, schema) for each in value["anyOf"] if each.get("type") != "null"))
    if "enum" in value:
        return ", ".join(f"`{_toml(each)}`" for each in value["enum"])
    bounds = [f"{sign} {value[key]:g}" for key, sign in _BOUNDS.items() if key in value]
    names = {
        "array": "list",
        "object": "table",
        "number": "number",
        "integer": "integer",
        "string": "text",
        "boolean": "true or false",
    }
    return " ".join([names.get(value.get("type", ""), "any"), *bounds])


_BOUNDS: Final = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def environment(_name: str = "") -> Iterator[str]:
    """Yield all environment variables, with what the source says of each."""
    module = importlib.import_module("oneaccord.common.variables")
    source = inspect.getsource(module)  # the module's: the enumeration has a public path by now
    yield "| variable | meaning |\n|---|---|"
    for name, words in re.findall(r'^    [A-Z_]+ = "(\w+)"[^\n]*\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL):
        yield f"| `{name}` | {one_line(words)} |"
    yield ""


def exit_codes(_name: str = "") -> Iterator[str]:
    """Yield what each command ends with: the words of the functions that return it."""
    main = importlib.import_module("oneaccord.cli.main").main
    start = importlib.import_module("oneaccord.local.processes").run_job
    yield "| command | it ends with |\n|---|---|"
    yield f"| every command | {one_line(_returned(main))} |"
    yield f"| `oneaccord run` | {one_line(_returned(start))} |"
    for path, command in commands():
        said = re.search(r"Ends with (exit code .*?)(?:\.\s|\.$|\n\n)", f"{command.help}\n\n", re.DOTALL)
        if said:
            yield f"| `oneaccord {' '.join(path)}` | {one_line(said[1])} |"
    yield ""


def _returned(function: Any) -> str:
    """Return what a docstring says of the exit code that a function returns."""
    words = re.search(r"Returns\n-+\n\w+\n((?:    .*\n?)+)", inspect.getdoc(function) or "")
    if words is None:
        raise ValueError(f"the docstring of {function.__qualname__} has no section Returns with the exit code")
    return " ".join(words[1].split()).removeprefix("The exit code: ")


GENERATORS: Final[dict[str, Callable[[str], Iterator[str]]]] = {
    **dict.fromkeys(PACKAGES, api),
    "command-line": command_line,
    "environment": environment,
    "errors": errors,
    "exit-codes": exit_codes,
    "settings": settings,
}


def fill(app: Any, _page: str, source: list[str]) -> None:
    """Put what is generated into a page, as Sphinx reads it."""
    with mock(app.config.autodoc_mock_imports):
        source[0] = MARK.sub(lambda mark: "\n".join(GENERATORS[mark[1]](mark[1])), source[0])


def show_public_paths(_app: Any) -> None:
    """Give each public name the package from which a program imports it, in the place of the module that defines it."""
    for package in reversed(PACKAGES):
        for name, thing in public_names(importlib.import_module(package)).items():
            if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__.startswith("oneaccord"):
                _ORIGINAL[f"{package}.{name}"] = thing.__module__
                if not type(thing).__module__.startswith(
                    "msgspec"
                ):  # it reads the types of a signature in the module of the class
                    thing.__module__ = package


def leave_out(_app: Any, _what: str, _name: str, thing: Any, _skip: bool, _options: Any) -> bool | None:
    """Leave out what only core calls, which its first sentence says, and what a class inherits from Python."""
    words = (inspect.getdoc(thing) or "").partition("\n")[0]
    foreign = inspect.isroutine(thing) and not (getattr(thing, "__module__", None) or "").startswith("oneaccord")
    return True if foreign or words.endswith("; for core.") else None


def link_pages(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Make links of the pages that a docstring names by their paths in the repository."""
    lines[:] = [re.sub(r"(?<![`\w])docs/([\w/-]+)\.md", r":doc:`/\1`", line) for line in lines]


def find_public(app: Any, _env: Any, node: Any, content: Any) -> Any:
    """Find a name that stands without its package, as docstrings write it."""
    if node.get("refdomain") != "py":
        return None
    domain = app.env.domains.python_domain
    for package in PACKAGES:
        path = f"{package}.{node['reftarget'].removeprefix('oneaccord.').removeprefix('oa.')}"
        if path in domain.objects:
            return domain.resolve_xref(app.env, node["refdoc"], app.builder, "obj", path, node, content)
    return None


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("builder-inited", show_public_paths)
    app.connect("source-read", fill)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("autodoc-process-docstring", link_pages, priority=400)
    app.connect("missing-reference", find_public)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
