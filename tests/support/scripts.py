"""Scripts of the repository as modules, so that a test can call what is in them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["module_of"]


def module_of(script: Path) -> ModuleType:
    """Return a script as a module, which is there under its own name from then on."""
    found = sys.modules.get(script.stem)
    if found is not None and found.__file__ == str(script):
        return found
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module
