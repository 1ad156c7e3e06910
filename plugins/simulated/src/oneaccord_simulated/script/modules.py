"""The modules of a program that each rank has for itself: those that lie in the program's folder, as if each rank were a process."""

from __future__ import annotations

import importlib._bootstrap
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Modules"]

_PACKAGES = "-packages" + os.sep
"""The parts of an installed module's path; the program's folder may contain its environment."""
_LOCKS: dict[str, Any] = getattr(importlib._bootstrap, "_module_locks", {})
"""Python's locks of modules that are being imported. A rank may wait for others while it holds one, in a module that calls `oneaccord.init`,
and these come through the same lines."""


class Modules(MetaPathFinder):
    """Knows which modules are the program's own. It finds none, and only sees which ones are looked for.

    Parameters
    ----------
    folder
        The folder of the program.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(os.path.realpath(folder), "")  # noqa: PTH118 - compared with names of files
        self._sought: set[str] = set()
        self._own: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Note that a module is looked for."""
        self._sought.add(fullname)
        return None

    def take(self) -> dict[str, tuple[Any, Any]]:
        """Take those of the rank that ran out of the process; return them with their locks."""
        for name in self._sought & sys.modules.keys():
            if self._is_own(sys.modules[name]):
                self._own.add(name)
            self._sought.discard(name)
        return {name: (sys.modules.pop(name, None), _LOCKS.pop(name, None)) for name in self._own}

    def give(self, taken: dict[str, tuple[Any, Any]]) -> None:
        """Put those of the rank that runs next into the process."""
        for name, (module, lock) in taken.items():
            if module is not None:
                sys.modules[name] = module
            if lock is not None:
                _LOCKS[name] = lock

    def _is_own(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        file = os.path.realpath(file) if isinstance(file, str) else ""
        return file.startswith(self._folder) and _PACKAGES not in file
