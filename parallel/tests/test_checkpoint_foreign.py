"""Checkpoints that somebody made who is no `save`: whatever their metadata say, a load reads what is in the files, or raises."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forged_checkpoints import body_of, changed, forge, look, save_some, sealed

import oneaccord_parallel as mp
from oneaccord.errors import UsageError
from oneaccord_parallel.boxes import Box
from oneaccord_parallel.checkpoint.tiling import tile
from oneaccord_simulated import run

_FAR = 2**60


def text(body, old, new):
    changed = json.dumps(body, separators=(",", ":")).replace(old, new)
    assert new in changed
    return changed.encode()


def rename(body, name):
    (old,) = body["files"]
    body["files"] = {name: body["files"][old]}
    for array in body["arrays"].values():
        for chunk in array["chunks"]:
            chunk["file"] = name


def huge(body):
    (file,) = body["files"]
    body["files"][file] = 2 * _FAR
    body["block_bytes"] = _FAR
    body["arrays"] = {"a": {"path": ["a"], "dtype": "uint8", "shape": [_FAR], "chunks": [
        {"offset": [0], "shape": [_FAR], "file": file, "start": 0, "crc32": "00000000"}]}}  # fmt: skip


def a(body, **changes):
    body["arrays"]["a"] |= changes


def piece(body, **changes):
    body["arrays"]["a"]["chunks"][0] |= changes


FORGED = {
    "a gap": (lambda b: a(b, chunks=[]), "its 0 pieces do not hold each element of shape (8,) exactly once: they have 0"),
    "a gap and an overlap": (lambda b: b["arrays"]["b"]["chunks"][2].update(offset=[2, 2]), "exactly once: they have 24"),
    "twice": (lambda b: b["arrays"]["a"]["chunks"].append(b["arrays"]["a"]["chunks"][0]), "they have 16"),
    "beyond": (lambda b: b["arrays"]["b"]["chunks"][2].update(offset=[2, 4]), "do not hold each element"),
    "negative start": (lambda b: piece(b, start=-8), "Expected `int` >= 0 - at `$.arrays[...].chunks[0].start`"),
    "behind the end": (lambda b: piece(b, start=10**6), "bytes 1000000 to 1000064 of"),
    "bytes shared": (lambda b: b["arrays"]["b"]["chunks"][0].update(start=b["arrays"]["a"]["chunks"][0]["start"]), "arrays 'b' and 'a' share"),
    "negative offset": (lambda b: piece(b, offset=[-1]), "Expected `int` >= 0"),
    "other axes": (lambda b: piece(b, offset=[0, 0], shape=[8, 1]), "and the array 1 axes"),
    "no checksum": (lambda b: piece(b, crc32=""), "0 digits of checksums, and 64 bytes in blocks of 1048576"),
    "no digits": (lambda b: piece(b, crc32="zzzzzzzz"), "matching regex"),
    "negative blocks": (lambda b: b.update(block_bytes=-1), "Expected `int` >= 1 - at `$.block_bytes`"),
    "objects": (lambda b: a(b, dtype="object"), "a checkpoint cannot hold dtype object"),
    "records": (lambda b: a(b, dtype="i4,i4"), "a checkpoint cannot hold dtype i4,i4"),
    "negative shape": (lambda b: a(b, shape=[-8]), "Expected `int` >= 0"),
    "no memory": (lambda b: a(b, shape=[0, 2**62], chunks=[]), "no memory can hold an array of float64 with shape (0, 4611686018427387904)"),
    "65 axes": (lambda b: a(b, shape=[1] * 65), "length <= 64"),
    "no ranks": (lambda b: b.update(world_size=0), "Expected `int` >= 1"),
    "no save": (lambda b: b.update(save=""), "is not one of its save, ''"),
    "another save": (lambda b: rename(b, f"data-{'0' * 16}-0.safetensors"), "is not one of its save"),
    "another folder": (lambda b: rename(b, "../outside.bin"), "matching regex"),
    "the root": (lambda b: rename(b, "/etc/passwd"), "matching regex"),
    "NUL": (lambda b: rename(b, f"data-{b['save']}-0.safetensors\0"), "matching regex"),
    "no such file": (lambda b: piece(b, file="x"), "of 'x', which is not among its files"),
    "below an array": (lambda b: b["arrays"]["b"].update(path=["a", 0]), "a leaf is at ['a'], and another one there or below it"),
    "the same place": (lambda b: b["values"]["v.0"].update(path=["a"]), "a leaf is at ['a'], and another one"),
    "one name": (lambda b: b["values"].update(a=b["values"]["v.0"]), "'a' is both an array and a value"),
    "no integer": (lambda b: b["values"]["v.0"].update(value={"$int": [1]}), "value 'v.0': an object with the keys ['$int']"),
    "no float": (lambda b: b["values"]["v.0"].update(value={"$float": "ab"}), "the keys ['$float'] does not represent a value"),
    "no key": (lambda b: b.update(extra={"$dict": [[{}, 1]]}), "a dict cannot be a key"),
    "deep": (lambda b: text(b, '"big"', '"deep":' + "[" * 200 + "]" * 200 + ',"big"'), "it is nested deeper than 100"),
    "very deep": (lambda b: text(b, '"big"', '"deep":' + "[" * 100_000 + "]" * 100_000 + ',"big"'), "does not have the fields"),
    "twice said": (lambda b: text(b, '"dtype":"int16"', '"dtype":"int8","dtype":"int16"'), "has the key 'dtype' twice"),
    "two arrays of one name": (lambda b: text(b, '"arrays":{', '"arrays":{"a":' + json.dumps(b["arrays"]["a"]) + ","), "has the key 'a' twice"),
    "NaN": (lambda b: text(b, '"step":1', '"step":NaN'), "malformed"),
    "no number": (lambda b: text(b, '"time":', '"time":1e999,"was":'), "Number out of range"),
    "no time": (lambda b: b.update(time=1e300), "- at `$.time`"),
    "no step": (lambda b: b.update(step=-3), "Expected `int` >= 0 - at `$.step`"),
    "no UTF-8": (lambda b: text(b, '"big"', '"@"').replace(b"@", b"\xff"), "does not have the fields"),
}  # fmt: skip


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign") / "c"
    save_some(path)
    return path


@pytest.fixture
def some(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "c"))


@pytest.mark.parametrize(("change", "said"), FORGED.values(), ids=FORGED)
def test_metadata_that_no_save_writes_are_refused(some, change, said):
    forge(some, change)
    for read in (mp.load, mp.describe):
        with pytest.raises(mp.CheckpointFormatError) as caught:
            read(some)
        assert said in str(caught.value)
        assert caught.value.file == str(some / "metadata.json")


def test_an_array_larger_than_its_file_takes_no_memory(some):
    forge(some, huge)
    with pytest.raises(mp.CheckpointCorruptError, match=f"and had {2 * _FAR} when it was saved"):
        mp.load(some)
    assert mp.latest(some.parent) is None


@given(st.integers(0, 2**64))
def test_every_element_of_a_load_comes_from_a_file(pristine, seed):
    body = changed(body_of(pristine), random.Random(seed))
    content = sealed(json.dumps(body, separators=(",", ":")).encode()[1:])
    with tempfile.TemporaryDirectory() as folder:
        for file in pristine.glob("data-*"):
            os.link(file, Path(folder, file.name))
        Path(folder, "metadata.json").write_bytes(content)
        look(Path(folder), content)


@pytest.mark.parametrize("name", ["data", "metadata"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_file_that_is_none_is_refused_and_not_waited_for(some, name, kind):
    (file,) = some.glob(f"{name}*")
    file.rename(some.parent / "elsewhere")
    {"pipe": os.mkfifo, "link": lambda file: file.symlink_to(some.parent / "elsewhere"), "folder": Path.mkdir}[kind](file)
    with pytest.raises(mp.CheckpointFormatError, match="a checkpoint has only regular files") as caught:
        mp.load(some)
    assert caught.value.file == str(file)
    assert mp.latest(some.parent) is None
    if name == "metadata":
        with pytest.raises(mp.CheckpointFormatError, match="It is not replaced"):
            mp.save({"a": 1}, some)


def test_metadata_of_gigabytes_are_not_read(some):
    os.truncate(some / "metadata.json", 1 << 40)
    with pytest.raises(mp.CheckpointFormatError, match="it has 1,099,511,627,776 bytes, and these at most 268,435,456"):
        mp.describe(some)


def test_a_link_to_a_safetensors_file_is_followed(some, tmp_path):
    (file,) = some.glob("data-*")
    (tmp_path / "model.safetensors").symlink_to(file)
    assert mp.load(tmp_path / "model.safetensors")["a"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_checkpoint_behind_a_link_is_not_removed(some, tmp_path):
    def program(group):
        with mp.AsyncSaver(tmp_path / "saves", group, keep=1) as saver:
            saver.save({"a": 1}, step=7).wait()

    (tmp_path / "saves").mkdir()
    (tmp_path / "saves" / "1").symlink_to(some)
    run(program, 1)
    assert mp.load(some)["a"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert mp.latest(tmp_path / "saves").step == 7


def entry(dtype="U8", shape="[8]", offsets="[0,8]", name="x"):
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (entry(shape='["8"]'), "Expected `int`, got `str`"),
        (entry(shape="[8.5]"), "Expected `int`, got `float`"),
        (entry(shape="[-8]"), "Expected `int` >= 0"),
        (entry(offsets="[-8,0]"), "Expected `int` >= 0"),
        (entry(shape="[9]"), "its shape (9,) takes 9 bytes, and it has bytes 0 to 8"),
        (entry(dtype="O"), "it has dtype 'O', and oneaccord reads BOOL, I8"),
        (entry(shape="[0,4611686018427387904]", dtype="F64", offsets="[0,0]"), "no memory can hold"),
        (f"{entry()},{entry(name='y')}", "'y' begins at byte 0 of the data, and 'x' ends at byte 8, so that they overlap"),
        (entry(shape="[4]", offsets="[4,8]"), "'x' begins at byte 4 of the data, and 'the data' begins at byte 0, so that they leave bytes out"),
        (entry(shape="[4]", offsets="[0,4]"), "there are 4 bytes behind its last array"),
        (f"{entry()},{entry()}", "has the key 'x' twice"),
        (f'"y":{"[" * 100_000}{"]" * 100_000}', "is not a safetensors file"),
    ],
)  # fmt: skip
def test_a_safetensors_header_that_its_data_do_not_fit_is_refused(tmp_path, header, said):
    file = tmp_path / "x.safetensors"
    text = f"{{{header}}}".encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(1, 9)))
    with pytest.raises(mp.CheckpointFormatError) as caught:
        mp.load(file)
    assert said in str(caught.value)


def test_pieces_of_many_axes_are_compared_soon():
    shape = (2,) * 64
    halves = [Box((*(0,) * axis, 1, *(0,) * (63 - axis)), (*(1,) * (axis + 1), *(2,) * (63 - axis))) for axis in range(64)]
    boxes = [*halves, Box((0,) * 64, (1,) * 64)]
    assert tile(boxes, shape)
    assert not tile(boxes[:-1], shape)
    assert not tile([*boxes[:-1], boxes[-2]], shape)


def test_a_key_that_is_a_tuple_comes_back_as_one(tmp_path):
    mp.save({"a": 1}, tmp_path, extra={(1, (2, "x")): [3]})
    assert mp.describe(tmp_path).extra == {(1, (2, "x")): [3]}


def test_a_value_that_is_nested_too_deep_is_refused(tmp_path):
    deep = []
    deep.append(deep)
    with pytest.raises(UsageError, match="nested deeper than 100"):
        mp.save({"a": 1}, tmp_path, extra=deep)


def test_names_in_a_checkpoint_do_not_reach_the_terminal(tmp_path):
    mp.save({"a\x1b]0;title\x07\x9b\r\n\u202eb": 1, "c": "\x1b"}, tmp_path)
    assert str(mp.describe(tmp_path)).splitlines()[1:] == [r"  a\x1b]0;title\x07\u009b\x0d\n\u202eb  1", f"  {'c':36}  '\\x1b'"]
