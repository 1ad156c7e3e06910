"""Check which module may import which: the rule of docs/explanation/architecture.md, read from the source, nothing is imported.

Usage: python tools/check_imports.py [ROOT]

What counts: every import, also one inside a function, and one under ``if TYPE_CHECKING``: who names the types of a module must know it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The rooms of core, from the lowest to the highest. A room may import those of the rows above it in this table, and itself.
ROWS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "_version errors",
        "common",
        "launchers",
        "arrays schedule",
        "contract timeline",
        "kit net runtime config",
        "control",
        "explain",
        "job",
        "calls local",
        "group",
        "engines",
        "api",
        "cli",
        "__main__",
    )
)

# Those of the lab, which may also import all of core; nothing of core imports the lab.
LAB = "oneaccord_lab"
LAB_ROWS: tuple[frozenset[str], ...] = (
    frozenset({"bench", "drawing", "simulation"}),
    frozenset({"tuning"}),
    frozenset({"commands"}),
)

# Those of the training layers, which use what every program may use: `oneaccord` itself and its errors.
PARALLEL = "oneaccord_parallel"
PARALLEL_ROWS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "arrays trees sampling rpc",
        "layout boxes optimizers normalization agreement scaling axes overlaps torch_second",
        "compress pipeline sharded_arrays torch_batch_norm tensor_parallel",
        "vocab_parallel dtensor",
        "clip",
        "gradients sharded checkpoint",
        "torch_functional torch_tensor_parallel",
        "commands torch jax",
    )
)

# Those of the conformance suite, which strangers run: it uses what every program and every plugin may use.
CONFORMANCE = "oneaccord_conformance"
CONFORMANCE_ROWS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "arrays launchers memory patience",
        "ranks",
        "threads processes rank",
        "worlds",
        "registry",
        "chapters running",
        "reports",
        "commands pytest",
    )
)
MAY_IMPORT = {CONFORMANCE: ("oneaccord", "oneaccord.api"), PARALLEL: ("oneaccord", "oneaccord.errors")}

# Rooms that may import nothing of oneaccord but these: schedules are data, and know no arrays and no sockets.
NARROW: dict[str, frozenset[str]] = {
    "schedule": frozenset({"common", "errors", "schedule"}),
    "drawing": frozenset({"errors", "schedule", "drawing"}),
}

# Packages that only some rooms may import, and packages that no module may import at its top.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "typer": ("oneaccord.cli", "oneaccord_conformance.commands", "oneaccord_lab.commands", "oneaccord_parallel.commands"),
    "rich": ("oneaccord_conformance.commands", "oneaccord_lab.commands", "oneaccord_parallel.checkpoint"),
    "matplotlib": ("oneaccord_lab.commands",),
}
# But those that derive from a class of such a package, and that others import inside functions.
NEEDS_AT_TOP: dict[str, str] = {
    "oneaccord_parallel.torch_batch_norm": "torch",
    "oneaccord_parallel.torch_second": "torch",
    **{
        f"oneaccord_torch.{name}": "torch"
        for name in ("backend", "calls", "joining", "process_group", "ranks", "registering", "work")
    },
}
NEVER_AT_TOP: frozenset[str] = frozenset({"cupy", "jax", "matplotlib", "mpi4py", "torch", "rich"})

# All that a plugin may import of core; what is no backend of ours, but makes one of us, uses what every program may use.
PLUGINS_MAY_IMPORT = "oneaccord.api"
BRIDGES = ("oneaccord_torch",)


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: its full name, where, and whether it is imported together with the importing module."""

    target: str
    line: int
    at_top: bool


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its full name, its path, and what it imports."""

    name: str
    path: Path
    imports: tuple[Import, ...]

    @property
    def room(self) -> str:
        """The part of the name below the package, ``"schedule"`` for ``oneaccord.schedule.steps``; empty for the package."""
        return room_of(self.name)


def room_of(name: str) -> str:
    """Return the room of a module's full name."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def is_type_checking(test: ast.expr) -> bool:
    """Tell whether an ``if`` asks for TYPE_CHECKING."""
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def statements(tree: ast.AST, at_top: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the import statements, and whether they run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_top
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            yield from statements(ast.Module(node.body, []), at_top=False)
            yield from statements(ast.Module(node.orelse, []), at_top)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from statements(node, at_top and not inside)


def targets(node: ast.Import | ast.ImportFrom, importer: str, is_package: bool, known: frozenset[str]) -> Iterator[str]:
    """Yield the full names of the modules that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        package = importer.split(".") if is_package else importer.split(".")[:-1]
        package = package[: len(package) - (node.level - 1)]
        base = ".".join([*package, base]) if base else ".".join(package)
    for alias in node.names:
        full = f"{base}.{alias.name}"
        yield full if full in known else base


def read(source: Path, elsewhere: frozenset[str] = frozenset()) -> list[Module]:
    """Return the modules of all packages under a ``src`` folder; ``elsewhere`` names modules that other folders hold."""
    files: dict[str, Path] = {}
    for path in sorted(source.rglob("*.py")):
        parts = list(path.relative_to(source).with_suffix("").parts)
        if not all(part.isidentifier() for part in parts):
            continue  # no module of the package: a file of a template
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    known = elsewhere.union(files)
    modules = []
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        imports = [
            Import(target, node.lineno, at_top)
            for node, at_top in statements(tree)
            for target in targets(node, name, path.name == "__init__.py", known)
        ]
        modules.append(Module(name, path, tuple(imports)))
    return modules


def check_module(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and fault for each import of a module of core, or of the lab, that its room may not make."""
    own, room = module.name.split(".", maxsplit=1)[0], module.room
    tables = {
        CONFORMANCE: (CONFORMANCE_ROWS, "CONFORMANCE_ROWS"),
        LAB: (LAB_ROWS, "LAB_ROWS"),
        PARALLEL: (PARALLEL_ROWS, "PARALLEL_ROWS"),
    }
    table, its_name = tables.get(own, (ROWS, "ROWS"))
    rows = {room: number for number, row in enumerate(table) for room in row}
    if room and room not in rows:
        yield 1, f"the room {room!r} has no place yet: put it into {its_name} in tools/check_imports.py"
        return
    for item in module.imports:
        package = item.target.split(".")[0]
        other = room_of(item.target)
        if package in ONLY_IN and f"{own}.{room}" not in ONLY_IN[package]:
            yield item.line, f"{package} is for {' and '.join(ONLY_IN[package])} alone"
        elif package in NEVER_AT_TOP and item.at_top and NEEDS_AT_TOP.get(module.name) != package:
            yield item.line, f"{package} must be imported inside the function that needs it: `import oneaccord` stays light"
        elif package.startswith("oneaccord_") and not own.startswith(package):
            yield item.line, f"{own} imports {package}; reach it by name, through the plugin manager"
        elif own in MAY_IMPORT and package == "oneaccord":
            if item.target not in MAY_IMPORT[own]:
                yield item.line, f"{own} imports {' and '.join(MAY_IMPORT[own])} alone, and this one {item.target}"
        elif package not in ("oneaccord", own) or not room:
            continue  # what the package itself offers may come from anywhere
        elif not other:
            yield item.line, "a module inside oneaccord imports the package oneaccord itself; import the module that is meant"
        elif room in NARROW and other not in NARROW[room]:
            yield item.line, f"{room} may import only {', '.join(sorted(NARROW[room]))}, and imports {other}"
        elif package == own and other in rows and other != room and rows[other] >= rows[room]:
            yield item.line, f"{room} imports {other}, which does not stand below it"


def check_plugin(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and fault for each import of a module of a plugin that plugins may not make."""
    own = module.name.split(".", maxsplit=1)[0]
    for item in module.imports:
        package = item.target.split(".")[0]
        if own in BRIDGES and item.target in ("oneaccord", "oneaccord.errors"):
            continue
        if package == "oneaccord" and item.target != PLUGINS_MAY_IMPORT:
            yield item.line, f"a plugin imports {PLUGINS_MAY_IMPORT} alone, and this one {item.target}"
        elif package.startswith("oneaccord_") and not own.startswith(package):
            yield item.line, f"the plugin {own} imports {package}"


def find_circles(modules: list[Module]) -> Iterator[str]:
    """Yield in words each set of modules that all import each other, be it through others."""
    names = {module.name for module in modules}
    edges = {module.name: sorted({item.target for item in module.imports} & names) for module in modules}

    def reached(name: str) -> frozenset[str]:
        found: set[str] = set()
        ahead = [name]
        while ahead:
            new = set(edges[ahead.pop()]) - found
            found |= new
            ahead += new
        return frozenset(found)

    beyond = {name: reached(name) for name in names}
    circles = {frozenset(other for other in beyond[name] if name in beyond[other]) for name in names}
    for circle in sorted(circles, key=sorted):
        if circle:
            arrows = [f"{name} -> {', '.join(sorted(circle & set(edges[name])))}" for name in sorted(circle)]
            yield f"a circle of imports: {'; '.join(arrows)}"


def check(root: Path) -> list[str]:
    """Return every fault in the repository at ``root``, as lines of ``path:line: what is wrong``."""
    faults = []
    core = read(root / "core" / "src")
    names = frozenset(module.name for module in core)
    lab = read(root / "lab" / "src", names)
    conformance = read(root / "conformance" / "src", names)
    parallel = read(root / "parallel" / "src", names)
    trees = [core, conformance, lab, parallel, *(read(source, names) for source in sorted(root.glob("plugins/*/src")))]
    for tree in trees:
        look = check_plugin if tree not in (core, conformance, lab, parallel) else check_module
        faults += [f"{m.path.relative_to(root)}:{line}: {fault}" for m in tree for line, fault in look(m)]
        faults += find_circles(tree)
    return faults


if __name__ == "__main__":
    found = check(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    print("\n".join(found) or "imports: every module imports what it may")
    sys.exit(1 if found else 0)
