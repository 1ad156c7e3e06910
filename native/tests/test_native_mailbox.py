"""Mailboxes in C of a plugin that the compiled executor has never heard of: it needs ``mailbox.h`` alone."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_gpu.compiled import compiler
from support.worlds import must, thread_world

from oneaccord.api import Group

native = pytest.importorskip("oneaccord_native", reason="there was no C compiler", exc_type=ImportError)

FOLDER = Path(__file__).resolve().parent / "packets"


@pytest.fixture(scope="session")
def packets(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Compile the plugin's C, and register the plugin, once in this process."""
    found = compiler()
    if found is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("packets") / "packets.so"
    words = [found, "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{native.get_include()}"]
    subprocess.run([*words, "-o", library, FOLDER / "packets.c"], check=True)
    sys.path.insert(0, str(FOLDER))
    try:
        import packets as plugin
    finally:
        sys.path.remove(str(FOLDER))
    from oneaccord.config.plugins import get_plugin_manager

    plugin.load(library)
    get_plugin_manager().register(plugin, "packets")
    return plugin


@pytest.fixture
def boxes(packets: ModuleType) -> list[Any]:
    """The mailboxes that the test makes."""
    packets.made.clear()
    made: list[Any] = packets.made
    return made


def calls(group: Group) -> list[Any]:
    found: list[Any] = []
    other = (group.rank + 1) % group.world_size
    for number in range(40):
        short = np.full(100, float(number + group.rank))
        long = np.arange(3000.0) + group.rank  # of 24 kB, in more than one slot
        found += [group.all_reduce(short), group.all_reduce(long), group.broadcast(short, root=number % group.world_size)]
        found.append(group.sendrecv(short, other, (group.rank - 1) % group.world_size))
        if number % 13 == group.rank:
            time.sleep(0.01)  # so that C stops, and Python sleeps
    return [each.tobytes() for each in found]


@pytest.mark.parametrize("size", [2, 3])
def test_c_moves_the_messages_of_a_mailbox_that_it_does_not_know(boxes: list[Any], size: int) -> None:
    by_c = must(thread_world(calls, size, "packets"))
    taken = sum(box.taken() for box in boxes)
    boxes.clear()
    by_python = must(thread_world(calls, size, "packets", config={"native": False}))
    assert by_c == by_python
    assert taken > 40 * size
    assert sum(box.taken() for box in boxes) == 0 < sum(box.by_python for box in boxes)


def test_a_steady_call_needs_no_method_of_python(boxes: list[Any]) -> None:
    def body(group: Group) -> int:
        found = []
        for _ in range(5):
            group.all_reduce(np.ones(8))
            found.append(sum(box.by_python for box in boxes if box.own == group.rank))
        return found[-1] - found[0]

    patient = {"backends": {"packets": {"spin_s": 60.0}}}
    assert must(thread_world(body, 2, "packets", config=patient)) == [0, 0]


def test_c_sends_only_when_the_mailbox_has_room(boxes: list[Any]) -> None:
    def body(group: Group) -> float:
        if group.rank == 0:
            for number in range(2000):
                group.send(np.full(8, float(number)), 1)  # more than the socket holds, for a rank that sleeps
            return 0.0
        time.sleep(0.3)
        return float(sum(group.recv(0)[0] for _ in range(2000)))

    assert must(thread_world(body, 2, "packets")) == [0.0, 2000 * 1999 / 2]
    assert sum(box.taken() for box in boxes) > 0
    assert sum(box.unasked() for box in boxes) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"c_mailbox": None}, "PacketMailbox sets compiled, but its c_mailbox is no capsule as mailbox.h describes it"),
        (
            {"outgoing": (memoryview(bytearray(1024)),)},
            "has slots of 1024 bytes in Python and of 4096 in C: they must be the same",
        ),
    ],
)
def test_a_mailbox_whose_forms_disagree_is_the_plugins_fault(
    packets: ModuleType, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    made = packets.PacketMailbox.__init__

    def init(self: Any, *given: Any) -> None:
        made(self, *given)
        for name, value in change.items():
            setattr(self, name, value)

    monkeypatch.setattr(packets.PacketMailbox, "__init__", init)
    found = thread_world(lambda group: group.send(np.ones(1), 1) if group.rank == 0 else group.recv(0), 2, "packets")
    assert any(words in str(error) for error in found), found
    found = thread_world(lambda group: group.all_reduce(np.ones(1)), 2, "packets")
    assert any(words in str(error) for error in found), found


def test_another_call_of_a_peer_is_a_mismatch_in_both_forms(boxes: list[Any]) -> None:
    def body(group: Group) -> Any:
        for _ in range(3):
            group.all_reduce(np.ones(4))
        return group.all_reduce(np.ones(4 + group.rank))

    said = [[str(error) for error in thread_world(body, 2, "packets", config={"native": form})] for form in (True, False)]
    assert all("all_reduce" in text and "rank" in text for text in said[0])
    assert [type(error) for error in said[0]] == [type(error) for error in said[1]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "no attribute 'c_mailbox'"),
        ("a text", "PyCapsule_GetPointer"),
        ("another name", "PyCapsule_GetPointer"),
        ("a part", "c_mailbox has members that are missing: see oneaccord_native/mailbox.h"),
    ],
)
def test_what_is_no_mailbox_is_refused(packets: ModuleType, given: str | None, words: str) -> None:
    memory = ctypes.create_string_buffer(200)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = b"oneaccord.mailbox.1" if given == "a part" else b"other"
    capsule = given if given == "a text" else make(ctypes.addressof(memory), name, None)
    box = SimpleNamespace() if given is None else SimpleNamespace(c_mailbox=capsule)
    step = (0, box, b"h" * 30, b"t" * 26, 8, 0, 0, 0)
    with pytest.raises((ValueError, AttributeError), match=words):
        native.Program((step,), ((0, 0, -1),), None, 0, 8, 0, None)
