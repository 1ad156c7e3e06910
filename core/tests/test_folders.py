"""Files in folders where others may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oneaccord.common.folders import read_regular, write_new
from oneaccord.errors import UsageError


def test_a_link_at_the_name_of_a_new_file_is_replaced(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.write_text("mine")
    link.symlink_to(mine)
    before = os.umask(0)
    try:
        write_new(link, b"new")
    finally:
        os.umask(before)
    assert (mine.read_text(), link.read_text(), link.is_symlink()) == ("mine", "new", False)
    assert link.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [link, mine]


def test_a_link_at_a_foretold_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / f"new.{bytes(8).hex()}.unfinished").symlink_to(mine)
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "new", b"new")
    assert mine.read_text() == "mine"


def test_nothing_is_left_where_the_name_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(IsADirectoryError):
        write_new(tmp_path / "new", b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]


def test_what_is_no_file_is_not_waited_for_and_nothing_larger_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        with pytest.raises(UsageError, match="not a regular file"):
            read_regular(path, 10)
    (tmp_path / "file").write_bytes(bytes(11))
    assert read_regular(tmp_path / "file", 11) == bytes(11)
    with pytest.raises(UsageError, match="it has 11 bytes, but at most 10 are allowed"):
        read_regular(tmp_path / "file", 10)
