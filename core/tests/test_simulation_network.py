"""Network files: what they may say, and what is said of those that say something else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from oneaccord.errors import ConfigError, UsageError
from oneaccord.schedule.simulation import PRESETS, Level, Network

FAT_TREE = """
topology = "fat_tree"
ranks_per_host = 8
reduction_bytes_per_s = inf
hosts_per_leaf = 16
oversubscription = 2

[host]
latency_s = 1.5e-6
bandwidth_bytes_per_s = 450e9
gap_s = 0.7e-6

[nic]
latency_s = 0.6e-6
bandwidth_bytes_per_s = 50e9

[spine]
latency_s = 0.2e-6
bandwidth_bytes_per_s = 50e9
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "network.toml"
    path.write_text(text)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    network = Network.load(write(tmp_path, FAT_TREE))
    assert network == Network(
        topology="fat_tree",
        ranks_per_host=8,
        hosts_per_leaf=16,
        oversubscription=2,
        host=Level(latency_s=1.5e-6, bandwidth_bytes_per_s=450e9, gap_s=0.7e-6),
        nic=Level(latency_s=0.6e-6, bandwidth_bytes_per_s=50e9),
        spine=Level(latency_s=0.2e-6, bandwidth_bytes_per_s=50e9),
    )
    assert network.reduction_bytes_per_s == math.inf
    assert network.nic is not None
    assert network.nic.gap == network.nic.latency_s
    assert network.host is not None
    assert network.host.gap == 0.7e-6


@pytest.mark.parametrize(
    ("old", "new", "key", "value", "words"),
    [
        (
            "ranks_per_host = 8",
            "ranks_per_host = 0",
            "ranks_per_host",
            0,
            "ranks_per_host = 0: it should be greater than or equal",
        ),
        ("latency_s = 0.6e-6", "latency_s = -1.0", "nic.latency_s", -1.0, "nic.latency_s = -1.0: it should be greater"),
        ("latency_s = 0.6e-6", "latency_s = true", "nic.latency_s", True, "expected a number"),
        ("gap_s = 0.7e-6", "gap = 0.7e-6", "host.gap", 0.7e-6, "this key is unknown. Valid here: latency_s, bandwidth_bytes"),
        ("[spine]", "[spin]", "spin", None, "this key is unknown. Valid here: topology"),
        ('"fat_tree"', '"fat_teer"', "topology", "fat_teer", "it should be 'wires', 'bus', 'fat_tree' or 'torus'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_file_key_and_value(
    tmp_path: Path, old: str, new: str, key: str, value: object, words: str
) -> None:
    path = write(tmp_path, FAT_TREE.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        Network.load(path)
    assert caught.value.file == str(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.key == key
    if value is not None:
        assert caught.value.value == value


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, FAT_TREE.replace("bandwidth_bytes_per_s = 450e9", ""))
    with pytest.raises(ConfigError, match=r"host\.bandwidth_bytes_per_s is missing, and it has no default"):
        Network.load(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "hosts_per_leaf = 16",
            "",
            "hosts_per_leaf is missing; the topology 'fat_tree' needs host, nic, spine, hosts_per_leaf",
        ),
        ("oversubscription = 2", "oversubscription = 3", "expected an oversubscription that divides hosts_per_leaf"),
        ("hosts_per_leaf", "dimensions = [1, 2, 3]\nhosts_per_leaf", "dimensions cannot be set with the topology 'fat_tree'"),
    ],
)
def test_parts_that_do_not_make_the_topology_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Network.load(write(tmp_path, FAT_TREE.replace(old, new)))


def test_a_file_that_is_no_toml_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not valid TOML"):
        Network.load(write(tmp_path, "topology ="))
    with pytest.raises(ConfigError, match="cannot be read"):
        Network.load(tmp_path / "other.toml")


def test_presets_are_those_of_the_documentation() -> None:
    assert list(PRESETS) == ["textbook", "fat-tree", "torus", "laptop"]
    assert {name: network.ranks_per_host for name, network in PRESETS.items()} == {
        "textbook": 1,
        "fat-tree": 8,
        "torus": 8,
        "laptop": 1,
    }
    assert all(network.summary for network in PRESETS.values())


def test_networks_are_frozen_and_can_be_keys() -> None:
    assert len({*PRESETS.values(), PRESETS["torus"].with_ranks_per_host(8)}) == len(PRESETS)
    with pytest.raises(UsageError, match="ranks_per_host is 0"):
        PRESETS["torus"].with_ranks_per_host(0)


def test_all_ranks_of_a_bus_are_neighbours() -> None:
    assert PRESETS["laptop"].neighbours(7) == 7
    assert PRESETS["torus"].neighbours(64) == 8
