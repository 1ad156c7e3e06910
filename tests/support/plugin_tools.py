"""Fixtures for the tests of core and of the lab: tiny plugins, installed for real in a folder of their own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oneaccord.config.plugins import BACKEND_GROUP, PluginManager, Switches
from oneaccord.config.plugins.installed import find_installed
from support import preloaded

if TYPE_CHECKING:
    from collections.abc import Callable

_numbers = itertools.count()

BACKEND = """
from oneaccord.api import BackendConfig
from oneaccord.contract.backend import BackendSpec
from oneaccord.contract.hookspecs import hookimpl

class Config(BackendConfig):
    interface: str = "lo"
    mode: Literal["fast", "safe"] = "fast"
    token: str | None = None

@hookimpl
def oneaccord_register_backends():
    return BackendSpec(name={name!r}, summary="a backend for tests", config=Config, {extra})
"""


class PluginFactory:
    """Installs distributions of one package each, as a wheel would: a package and its ``dist-info``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, str] = {}

    def __call__(
        self, name: str, source: str, *, distribution: str | None = None, group: str = BACKEND_GROUP, thing: str = ""
    ) -> str:
        """Install a module with ``source``, or a ``thing`` in it, under the entry point ``name``; return the module's name."""
        distribution = distribution or f"dist-{name}"
        module = f"plugin_for_tests_{next(_numbers)}"
        (self.folder / f"{module}.py").write_text("from typing import Literal\n" + textwrap.dedent(source))
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}{thing and f':{thing}'}\n")
        self.modules[name] = module
        return module

    def backend(self, name: str, extra: str = "factory='os:getcwd'", **where: str) -> str:
        """Install a backend whose spec has the arguments ``extra``."""
        return self(name, BACKEND.format(name=name, extra=extra), **where)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginFactory:
    """An empty folder on ``sys.path`` that plugins can be installed in."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return PluginFactory(folder)


@pytest.fixture
def manager(tmp_path: Path) -> PluginManager:
    """A plugin manager that sees no backend of the environment, only those that the test installs."""
    return PluginManager(Switches(block=frozenset(plugin.name for plugin in find_installed(BACKEND_GROUP))))


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in an empty folder, with this process's path and no variables of oneaccord but those given."""

    def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")}
        environ |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
        if args[:2] == ("-m", "oneaccord") and not any(name.startswith("PYTHON") for name in variables):
            return preloaded.run(args, cwd=tmp_path, environ=environ, timeout_s=30)
        return subprocess.run(
            [sys.executable, *args], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
        )

    return run
