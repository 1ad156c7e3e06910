"""Files that are secret: who is told that others can read them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from oneaccord.common import private
from oneaccord.common.private import warn_of_readers

ME, ROOT, ANOTHER = 1000, 0, 1001


@pytest.mark.parametrize(
    ("mode", "owner", "me", "words"),
    [
        (0o600, ME, ME, ""),
        (0o400, ME, ME, ""),
        (0o700, ME, ME, ""),
        (0o640, ME, ME, "can be read or changed by other users of this host (mode 0640)"),
        (0o604, ME, ME, "(mode 0604)"),
        (0o620, ME, ME, "(mode 0620)"),
        (0o640, ROOT, ME, ""),  # as Kubernetes mounts it with fsGroup, and Debian keeps keys of TLS
        (0o440, ROOT, ROOT, ""),
        (0o644, ROOT, ME, "(mode 0644)"),  # as Kubernetes mounts it by default
        (0o660, ROOT, ME, "(mode 0660)"),
        (0o600, ANOTHER, ME, "belongs to another user of this host (uid 1001)"),
        (0o600, ANOTHER, ROOT, "belongs to another user of this host (uid 1001)"),
    ],
)
def test_who_can_read_a_secret_file(mode: int, owner: int, me: int, words: str) -> None:
    told = private._others(mode, owner, me)
    assert words in told
    assert bool(words) == bool(told)


def test_a_warning_comes_once_for_each_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private.os, "geteuid", tmp_path.stat().st_uid.__int__)
    open_, private_ = tmp_path / "open", tmp_path / "private"
    for path, mode in ((open_, 0o644), (private_, 0o600)):
        path.touch()
        path.chmod(mode)
    (tmp_path / "link").symlink_to("open")
    with caplog.at_level(logging.WARNING, "oneaccord.security"):
        for name in ("open", "open", "private", "link", "none"):
            warn_of_readers(tmp_path / name, "the secret")
    assert [record.getMessage() for record in caplog.records] == [
        (
            f"oneaccord: the secret in {tmp_path / name} can be read or changed by other users of this host (mode 0644): `chmod 600` takes that back; in "
            "Kubernetes, mount it with `defaultMode: 0400`, or 0440 with an fsGroup"
        )
        for name in ("open", "link")
    ]
