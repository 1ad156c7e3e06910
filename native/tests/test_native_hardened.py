"""The built module has what the linker can do against those who find a mistake in C."""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

DYNAMIC, LOAD, STACK, READ_ONLY = 2, 1, 0x6474E551, 0x6474E552
EXECUTE, WRITE = 1, 2
RPATH, TEXTREL, RUNPATH, FLAGS = 15, 22, 29, 30
BIND_NOW = 8


class Part(NamedTuple):
    """A segment of an ELF file."""

    kind: int
    flags: int
    offset: int
    nbytes: int


@pytest.fixture(scope="module")
def module() -> bytes:
    """The file of the compiled part."""
    package = find_spec("oneaccord_native")
    assert package is not None
    assert package.submodule_search_locations is not None
    found = [path for place in package.submodule_search_locations for path in Path(place).glob("_core.*.so")]
    if not found:
        pytest.skip("there was no C compiler")
    data = found[0].read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        pytest.skip("the module is no ELF file of 64 bits, little-endian")
    return data


@pytest.fixture(scope="module")
def parts(module: bytes) -> list[Part]:
    """Its segments."""
    (table,) = struct.unpack_from("<Q", module, 0x20)
    size, count = struct.unpack_from("<HH", module, 0x36)
    rows = [struct.unpack_from("<IIQQQQ", module, table + size * number) for number in range(count)]
    return [Part(kind, flags, offset, nbytes) for kind, flags, offset, _, _, nbytes in rows]


@pytest.fixture(scope="module")
def dynamic(module: bytes, parts: list[Part]) -> dict[int, int]:
    """What the loader is told."""
    (part,) = (part for part in parts if part.kind == DYNAMIC)
    return dict(struct.iter_unpack("<QQ", module[part.offset : part.offset + part.nbytes]))


def test_addresses_are_bound_at_once_and_read_only(parts: list[Part], dynamic: dict[int, int]) -> None:
    assert [part.kind for part in parts].count(READ_ONLY) == 1
    assert dynamic[FLAGS] & BIND_NOW
    assert TEXTREL not in dynamic


def test_nothing_that_can_be_written_can_be_executed(parts: list[Part]) -> None:
    (stack,) = (part for part in parts if part.kind == STACK)
    assert not stack.flags & EXECUTE
    assert [part for part in parts if part.kind == LOAD and part.flags & EXECUTE and part.flags & WRITE] == []


def test_no_folder_of_the_build_is_searched_for_libraries(dynamic: dict[int, int]) -> None:
    assert {RPATH, RUNPATH} & set(dynamic) == set()


def test_functions_with_arrays_look_after_the_stack(module: bytes) -> None:
    assert b"__stack_chk_fail" in module
