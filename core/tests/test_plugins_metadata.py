"""Entry points as read from their files: what `importlib.metadata` finds."""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from pathlib import Path

import pytest

from oneaccord.config.plugins.metadata import InstalledPlugin, find_installed

POINTS = """
# a comment
[console_scripts]
pigeon = pigeon.cli:main

[oneaccord]
pigeon = pigeon.plugin
  crow=crow.plugin:module [extra]
# raven = raven.plugin

[oneaccord.extensions]
pigeon = pigeon.observer
"""


def distribution(folder: Path, name: str, points: str = POINTS, file: str = "METADATA") -> None:
    info = folder / name
    info.mkdir(parents=True)
    (info / file).write_text("Metadata-Version: 2.1\nName: Pigeon.Post\nVersion: 1.2\n\nName: no header\n")
    (info / "entry_points.txt").write_text(points)


def of_importlib(group: str) -> set[tuple[str, ...]]:
    found = importlib.metadata.entry_points(group=group)
    return {(each.name, each.dist.name, each.dist.version, each.value, group) for each in found if each.dist is not None}


def found(group: str) -> set[tuple[str, ...]]:
    listed = find_installed(group)
    assert listed == sorted(listed, key=lambda each: (each.name, each.distribution))
    return {(each.name, each.distribution, each.version, each.value, each.group) for each in listed}


@pytest.mark.parametrize("group", ["oneaccord", "oneaccord.extensions", "oneaccord.commands", "console_scripts"])
def test_what_is_found_is_what_importlib_finds(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path / "first", "pigeon_post-1.2.dist-info")
    distribution(tmp_path / "first", "other.egg-info", "[oneaccord]\nother = other\n", "PKG-INFO")
    distribution(tmp_path / "second", "Pigeon.Post-1.1.dist-info", "[oneaccord]\nhidden = hidden.plugin\n")
    (tmp_path / "first" / "file.egg-info").write_text("Name: file\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "missing"), str(tmp_path / "second"), *sys.path])

    names = {each[0] for each in found(group)}
    assert found(group) == of_importlib(group)
    assert "pigeon" in names or group == "oneaccord.commands"
    assert "hidden" not in names


def test_distributions_in_an_archive_are_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("pigeon-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pigeon\nVersion: 1.0\n")
        archive.writestr("pigeon-1.0.dist-info/entry_points.txt", "[oneaccord]\npigeon = pigeon.plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path / "archive.zip"))

    assert InstalledPlugin("pigeon", "pigeon", "1.0", "pigeon.plugin") in find_installed("oneaccord")


def test_distributions_that_another_finder_knows_are_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path / "elsewhere", "pigeon-1.2.dist-info", "[oneaccord]\npigeon = pigeon.plugin\n")

    class Finder(importlib.metadata.DistributionFinder):
        def find_distributions(self, context: object = None) -> list[importlib.metadata.Distribution]:  # type: ignore[override]
            return [importlib.metadata.PathDistribution(tmp_path / "elsewhere" / "pigeon-1.2.dist-info")]

        def find_spec(self, *_: object) -> None:
            return None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])

    assert "pigeon" in {each.name for each in find_installed("oneaccord")}
