"""Files that are damaged, missing or foreign: an error on every rank that names the file and the leaf."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oneaccord_parallel as mp
from oneaccord_parallel.checkpoint.metadata import _begin
from oneaccord_simulated import run

LARGE = np.arange(400_000, dtype="f8")  # three blocks and a bit


WRONG = b"\x3c" + bytes(7) + b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,8]}}'.ljust(60) + bytes(8)


def tree_of(rank, array=LARGE):
    half = len(array) // 2
    return {"w": mp.ShardedArray.of_range(array.shape, rank * half, array[rank * half : (rank + 1) * half].copy()), "lr": 0.5}


def saved(path, seed=0):
    run(lambda group: mp.save(tree_of(group.rank, LARGE + seed), path, group, step=seed), 2)
    return sorted(path.glob("data-*"))


def load_on_two(path, verify=False, tree=tree_of):
    """Load on two ranks; return the error that both raised, and the trees."""

    def program(group):
        mine, error = tree(group.rank, LARGE * 0), None
        try:
            mp.load(path, like=mine, group=group, verify=verify)
        except mp.CheckpointError as caught:
            error = caught
        group.barrier()
        return error, mine

    results = run(program, 2).results
    errors = [error for error, _ in results]
    assert len({(type(error), str(error), getattr(error, "file", None), getattr(error, "leaf", None)) for error in errors}) == 1
    return errors[0], [mine for _, mine in results]


def flip(file, bit):
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def untouched(trees):
    return not any(array.any() for tree in trees for _, array in tree["w"].pieces)


def test_one_flipped_bit_is_found_on_all_ranks_and_named(tmp_path):
    files = saved(tmp_path)
    for bit in (8 * files[1].stat().st_size - 1, 8 * 1_200_000, 8 * 300):
        flip(files[1], bit)
        error, _ = load_on_two(tmp_path)
        assert type(error) is mp.CheckpointCorruptError
        assert (error.file, error.leaf, error.peer) == (str(files[1]), "w", 1)
        assert "rank 1: leaf 'w': " in str(error)
        flip(files[1], bit)
    assert load_on_two(tmp_path)[0] is None


@given(st.data())
def test_no_flipped_bit_goes_unseen(data):
    array = np.arange(60, dtype="u1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        mp.save({"a": array, "b": -array}, path, extra={"x": [1, 2.5]})
        (file,) = path.glob("data-*")
        chosen = data.draw(st.sampled_from([file, path / "metadata.json"]))
        bit = data.draw(st.integers(0, 2**20)) % (8 * chosen.stat().st_size)  # the time has more digits or fewer
        flip(chosen, bit)
        try:
            found = mp.load(path)
        except mp.CheckpointError as error:
            assert error.file == str(chosen)  # noqa: PT017
        else:  # a bit of the names in the header, which metadata.json has as well
            assert chosen == file
            assert bit // 8 < file.stat().st_size - 120
            assert (found["a"] == array).all()
            assert (found["b"] == -array).all()


def test_a_block_that_is_read_in_several_runs_is_checked(tmp_path):
    array = np.arange(1000.0).reshape(10, 100)
    mp.save({"w": array}, tmp_path)
    (file,) = tmp_path.glob("data-*")
    flip(file, 8 * (file.stat().st_size - 4000))
    pieces = [
        ((0, 0), np.zeros((4, 100))),
        ((4, 0), np.zeros((1, 50))),
        ((4, 50), np.zeros((1, 50))),
        ((5, 0), np.zeros((5, 100))),
    ]
    with pytest.raises(mp.CheckpointCorruptError):
        mp.load(tmp_path, {"w": mp.ShardedArray((10, 100), pieces[::-1])})
    part = mp.ShardedArray((10, 100), pieces[:1])
    mp.load(tmp_path, {"w": part})
    with pytest.raises(mp.CheckpointCorruptError):
        mp.load(tmp_path, {"w": part}, verify=True)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (lambda file, other: os.truncate(file, 1000), mp.CheckpointCorruptError, "has 1000 bytes, and had"),
        (lambda file, other: file.unlink(), mp.CheckpointMissingError, "is missing"),
        (
            lambda file, other: file.write_bytes(other.read_bytes()),
            mp.CheckpointFormatError,
            "is damaged, or the file of another save",
        ),
    ],
    ids=["truncated", "missing", "of another save"],
)
def test_a_wrong_file_is_named_on_all_ranks_before_anything_is_written(tmp_path, damage, error, said):
    file, other = saved(tmp_path / "a")[1], saved(tmp_path / "b", 1)[1]
    damage(file, other)
    found, trees = load_on_two(tmp_path / "a")
    assert type(found) is error
    assert said in str(found)
    assert found.file == str(file)
    assert untouched(trees)


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (None, mp.CheckpointMissingError, "no save into it was completed"),
        (b"", mp.CheckpointFormatError, "not the metadata of a oneaccord checkpoint"),
        (b'{"state": 1}', mp.CheckpointFormatError, "not the metadata of a oneaccord checkpoint"),
        (
            b'{"format":"oneaccord-checkpoint","version":9,"crc32":"00000000","new":1}',
            mp.CheckpointFormatError,
            "version 9 of the format, but this oneaccord reads up to 1",
        ),
        (
            b'{"format":"oneaccord-checkpoint","version":1,"crc32":"648489c7","save":"\xff"}',
            mp.CheckpointFormatError,
            "does not have the fields of a checkpoint",
        ),
        (
            b'{"format":"oneaccord-checkpoint","version":0,"crc32":"%08x",' % zlib.crc32(_begin("")),
            mp.CheckpointFormatError,
            "not the metadata of a oneaccord checkpoint",
        ),
        (
            b'{"format":"oneaccord-checkpoint","version":%s,"crc32":"00000000",}' % (b"9" * 5000),
            mp.CheckpointFormatError,
            "not the metadata of a oneaccord checkpoint",
        ),
    ],
)
def test_wrong_metadata_is_named_on_all_ranks(tmp_path, content, error, said):
    if content is not None:
        (tmp_path / "metadata.json").write_bytes(content)
    found, trees = load_on_two(tmp_path)
    assert type(found) is error
    assert said in str(found)
    assert found.peer == 0
    assert untouched(trees)
    with pytest.raises(error, match="metadata"):
        mp.describe(tmp_path)


def test_metadata_that_were_edited_are_refused(tmp_path):
    saved(tmp_path)
    file = tmp_path / "metadata.json"
    content = json.loads(file.read_bytes())
    content["arrays"]["w"]["shape"] = [5]
    file.write_text(json.dumps(content, separators=(",", ":")))
    with pytest.raises(mp.CheckpointCorruptError, match=r"metadata.json is damaged: its checksum is not"):
        mp.load(tmp_path)
    mp.save({"a": 1}, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"metadata.json"}


def test_there_is_no_such_folder(tmp_path):
    with pytest.raises(mp.CheckpointMissingError, match="there is no such folder"):
        mp.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        mp.describe(tmp_path / "none")


def test_metadata_of_others_are_not_replaced(tmp_path):
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(mp.CheckpointFormatError, match="It is not replaced: choose another folder"):
        mp.save({"a": 1}, tmp_path)
    assert (tmp_path / "metadata.json").read_text() == "{}"
    (tmp_path / "file").write_text("")
    with pytest.raises(mp.CheckpointError, match="is a file; a checkpoint is a folder"):
        mp.save({"a": 1}, tmp_path / "file")


def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    for content in (b"", b"12345678", b"\x02" + bytes(7) + b"{]", b"\x0f" + bytes(7) + b'{"a":{"b":"c"}}', b"\xff" * 20, WRONG):
        file.write_bytes(content)
        with pytest.raises(mp.CheckpointFormatError, match=r"x\.safetensors"):
            mp.load(file)
    mp.save({"w": LARGE}, tmp_path / "c")
    (whole,) = (tmp_path / "c").glob("data-*")
    file.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(mp.CheckpointCorruptError, match="truncated: 1 bytes are missing"):
        mp.load(file)
