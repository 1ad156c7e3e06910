"""The program of `oneaccord run`: a script or a module, run as Python would run it."""

from __future__ import annotations

import builtins
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from oneaccord.api import LaunchRequest

__all__ = ["Program", "folder_of", "load"]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program.

    Attributes
    ----------
    code
        The code to run.
    file
        Its file.
    names
        The names that Python gives a main module besides its name.
    """

    code: CodeType
    file: str
    names: dict[str, Any]

    def run(self) -> None:
        """Run it as a main module of its own."""
        main = ModuleType("__main__")
        vars(main).update(self.names, __file__=self.file, __builtins__=builtins)
        sys.modules["__main__"] = main
        exec(self.code, vars(main))  # noqa: S102 - running the user's program is the task


def folder_of(request: LaunchRequest) -> str:
    """Return the folder from which the program imports first."""
    if request.is_module:
        return str(Path.cwd())
    path = Path(request.target).resolve()
    return str(path if path.is_dir() else path.parent)


def load(request: LaunchRequest) -> Program:
    """Find and compile the program.

    Raises
    ------
    SyntaxError
        It is no Python.
    ImportError
        There is no such module, or it cannot be run.
    """
    if request.is_module:
        return _module(request.target)
    path = Path(request.target).absolute()
    if path.is_dir():
        path /= "__main__.py"
    return Program(compile(path.read_bytes(), str(path), "exec"), str(path), {"__package__": None, "__spec__": None})


def _module(name: str) -> Program:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise ImportError(
            f"there is no module {name!r} to run: is it installed, and if it is a package, does it have a __main__?"
        )
    names = {"__package__": spec.parent, "__spec__": spec, "__loader__": spec.loader, "__cached__": spec.cached}
    return Program(code, spec.origin or name, names)
