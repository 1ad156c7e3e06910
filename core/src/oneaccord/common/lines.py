"""Which line of the program a call comes from: not one of oneaccord, nor of a library that lies in between.

Each file is of one of four kinds, in this order of preference: the program's own; an installed package, which may be the program
if there is nothing else; the standard library; oneaccord and its own packages.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Final

__all__ = ["INSTALLED", "OURS", "PROGRAM", "STANDARD", "kind_of", "line_of", "line_raised", "program_frame"]

PROGRAM: Final = 0
INSTALLED: Final = 1
STANDARD: Final = 2
OURS: Final = 3

_CORE = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep
_SCRIPTS = str(Path(sys.executable).parent) + os.sep  # the starter of an installed program, which is one line
_SITES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def program_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the program.

    If all of the program was installed, that is the innermost frame of an installed package; None if there is none of that either.

    Parameters
    ----------
    frame
        The frame to begin at; the search goes outwards.
    """
    installed = None
    while frame is not None:
        kind = kind_of(frame.f_code.co_filename)
        if kind == PROGRAM:
            return frame
        if kind == INSTALLED and installed is None:
            installed = frame
        frame = frame.f_back
    return installed


def line_of(frame: FrameType | None) -> str:
    """Return the line of the program that a stack is at, such as ``"train.py:31"``; empty if there is none.

    Parameters
    ----------
    frame
        As for `program_frame`.
    """
    found = program_frame(frame)
    return f"{_shown(found.f_code.co_filename, str(found.f_globals.get('__name__')))}:{found.f_lineno}" if found else ""


def line_raised(error: BaseException) -> str:
    """Return the last line of the program that an exception came through, as `line_of` does.

    Parameters
    ----------
    error
        The exception, which was raised.
    """
    found, trace = "", error.__traceback__
    while trace is not None:
        code, name = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__"))
        if kind_of(code.co_filename) == PROGRAM:
            found = f"{_shown(code.co_filename, name)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


@lru_cache(maxsize=1024)
def _shown(file: str, module: str) -> str:
    """Return a file with the folders that its module's name has, such as ``"shop/train.py"`` for ``shop.train``: alike in any folder.

    So the trace does not depend on the directory that a program is started in, or goes to.
    """
    if file.startswith("<"):
        return file
    parts = Path(file).parts
    return "/".join(parts[-1 - module.count(".") - (parts[-1] == "__init__.py") :])


def kind_of(file: str) -> int:
    """Return the owner of a file's code: PROGRAM, INSTALLED, STANDARD or OURS."""
    if file == "<string>":  # a method of a dataclass, or the program of `python -c`, whose main module has no file
        return PROGRAM if getattr(sys.modules.get("__main__"), "__file__", None) is None else STANDARD
    return _kind_of(file)


@lru_cache(maxsize=4096)
def _kind_of(file: str) -> int:
    if file.startswith("<"):
        return STANDARD if file.startswith("<frozen ") else PROGRAM
    if file.startswith(_CORE) or _is_of_layer(file):
        return OURS
    if any(site in file for site in _SITES) or file.startswith(_SCRIPTS):
        return INSTALLED
    return STANDARD if file.startswith(_LIBRARY) else PROGRAM


def _is_of_layer(file: str) -> bool:
    """Return whether a file is of a package called oneaccord or oneaccord_..., and is not the started program."""
    if "oneaccord" not in file or file == getattr(sys.modules.get("__main__"), "__file__", None):
        return False
    top = ""
    for folder in Path(file).parents:
        if not (folder / "__init__.py").exists():
            break
        top = folder.name
    return top == "oneaccord" or top.startswith("oneaccord_")
