"""Which frame of a stack is the program's: not one of oneaccord, of a layer of it, of the standard library or of what was installed."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from oneaccord.api import program_frame

CODE = "def call(*after):\n    return after[0](*after[1:])\n"
STANDARD = str(Path(os.__file__).parent / "contextlib.py")
SITE = f"{os.sep}env{os.sep}lib{os.sep}site-packages{os.sep}"
TORCH, SHOP = f"{SITE}torch{os.sep}autograd.py", f"{SITE}shop{os.sep}train.py"


def found(*files: str) -> str | None:
    """Return the file of the frame that counts in a thread, where code of each file calls that of the next one."""
    calls: list[Any] = []
    for file in files:
        names: dict[str, Any] = {}
        exec(compile(CODE, file, "exec"), names)
        calls.append(names["call"])
    frames: list[FrameType | None] = []
    thread = threading.Thread(target=calls[0], args=(*calls[1:], lambda: frames.append(program_frame(sys._getframe(1)))))
    thread.start()
    thread.join()
    return None if frames[0] is None else frames[0].f_code.co_filename


@pytest.fixture(autouse=True)
def _a_main_module_with_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of pytest-xdist have none, as `python -c`."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/main.py", raising=False)


@pytest.fixture
def layer(tmp_path: Path) -> str:
    folder = tmp_path / "oneaccord_layer" / "inner"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder.parent / "__init__.py").touch()
    return str(folder / "sync.py")


def test_libraries_between_the_program_and_the_call_are_skipped(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", "/home/me/train.py", raising=False
    )  # in a worker of pytest, there is none
    assert found("/home/me/train.py", STANDARD, layer) == "/home/me/train.py"
    assert found("/home/me/train.py", TORCH, STANDARD, layer, "<string>") == "/home/me/train.py"
    assert found("/home/me/train.py", "/home/me/model.py", TORCH, layer) == "/home/me/model.py"
    assert found("/home/me/train.py", "<stdin>", TORCH) == "<stdin>"


def test_only_packages_named_so_are_layers(layer: str) -> None:
    beside = str(Path(layer).parents[2] / "oneaccord_train.py")
    assert found("/home/me/train.py", beside) == beside
    assert found("/home/me/train.py", "/home/me/oneaccord/src/model.py") == "/home/me/oneaccord/src/model.py"


def test_what_was_started_is_the_program(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = str(Path(layer).with_name("started.py"))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", started, raising=False)
    assert found("/home/me/train.py", started, layer) == started


def test_an_installed_program_has_a_line_as_well(layer: str) -> None:
    command = str(Path(sys.executable).with_name("shop-train"))
    assert found(command, SHOP, STANDARD, layer) == SHOP
    assert found(STANDARD, layer) is None


def test_dash_c_is_the_program(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert found("<string>", STANDARD, layer) == "<string>"
