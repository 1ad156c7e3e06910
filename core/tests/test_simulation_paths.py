"""The ways of single messages: those of the virtual clock, and the networks that they lie on, by name or file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path as FilePath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.api import NETWORKS, ConfigError, Network, NetworkLevel, Paths
from oneaccord.errors import InvalidRankError, InvalidWorldSizeError
from oneaccord.schedule.simulation.routes import Wiring

TREE = Network(
    topology="fat_tree",
    ranks_per_host=2,
    host=NetworkLevel(latency_s=5, bandwidth_bytes_per_s=1),
    nic=NetworkLevel(latency_s=10, bandwidth_bytes_per_s=4, gap_s=2),
    spine=NetworkLevel(latency_s=3, bandwidth_bytes_per_s=2, gap_s=1),
    hosts_per_leaf=2,
    oversubscription=1,
)


def test_a_path_has_the_ports_and_links_of_its_way_with_their_gaps_and_bandwidths() -> None:
    paths = Paths(TREE, 10)  # hosts 0 to 4, leaves of hosts 0 and 1, 2 and 3, and 4
    inside, near, far = paths.between(2, 3), paths.between(2, 0), paths.between(2, 9)
    links = 2 * 10
    assert inside.queues == (2, 10 + 3)
    assert (inside.busy_s(100), inside.flight_s(100)) == ((105, 105), 105)
    assert near.queues == (2, links + 2, links + 1, 10 + 0)  # each host has a card's link up and one down
    assert near.busy_s(100) == (4 + 25, 2 + 25, 2 + 25, 4 + 25)
    assert near.flight_s(100) == 20 + 25
    # Two spine switches, of which host 4 is reached by the first; leaf 0 has the first link after those of the cards, leaf 2 the ninth.
    assert far.queues == (2, links + 2, links + 10, links + 10 + 9, links + 9, 10 + 9)
    assert far.busy_s(100) == (6 + 50, 2 + 25, 1 + 50, 1 + 50, 2 + 25, 6 + 50)
    assert far.flight_s(100) == 26 + 50
    assert [path.between_hosts for path in (inside, near, far)] == [False, True, True]
    assert paths.queue_count == 2 * 10 + 2 * 5 + 2 * 3 * 2


def test_all_ranks_of_a_bus_share_its_one_queue() -> None:
    paths = Paths(NETWORKS["laptop"], 3)
    assert [paths.between(a, b).queues for a, b in ((0, 1), (2, 0))] == [(0, 6, 4), (2, 6, 3)]
    assert paths.queue_count == 7
    assert not paths.between(0, 2).between_hosts


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Network, int, list[tuple[int, int]]]:
    network = draw(st.sampled_from([*NETWORKS.values(), TREE])).with_ranks_per_host(draw(st.integers(1, 9)))
    size = draw(st.integers(2, 400))
    rank = st.integers(0, size - 1)
    pairs = st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1])
    return network, size, draw(st.lists(pairs, min_size=1, max_size=20))


@given(worlds(), st.integers(0, 1 << 30))
def test_paths_are_the_routes_of_the_wiring(world: tuple[Network, int, list[tuple[int, int]]], nbytes: int) -> None:
    network, size, pairs = world
    wiring, paths = Wiring(network, size), Paths(network, size)
    sources, dests = np.array(pairs).T
    routes = wiring.routes(sources, dests, size)
    for i, (source, dest) in enumerate(pairs):
        path = paths.between(source, dest)
        links = [int(link) for link in routes.links[i] if link >= 0]
        levels = [wiring.kinds[kind].level for link, kind in zip(routes.links[i], routes.kinds[i], strict=True) if link >= 0]
        assert path.queues == (source, *(2 * size + link for link in links), size + dest)
        assert len(set(path.queues)) == len(path.queues)
        assert max(path.queues) < paths.queue_count
        port = routes.gap_s[i] + nbytes / routes.bandwidth[i]
        assert path.busy_s(nbytes) == (port, *(each.gap + nbytes / each.bandwidth_bytes_per_s for each in levels), port)
        assert path.flight_s(nbytes) == routes.latency_s[i] + nbytes / routes.bandwidth[i]
        assert path.between_hosts == (source // network.neighbours(size) != dest // network.neighbours(size))
        assert paths.between(source, dest) == path


def test_ways_are_found_for_many_hosts_at_once_and_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    size, network = 64, NETWORKS["torus"].with_ranks_per_host(1)
    calls = 0
    routes = Wiring.routes

    def counted(*args: object) -> object:
        nonlocal calls
        calls += 1
        return routes(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Wiring, "routes", counted)
    paths = Paths(network, size)
    doubling_pairs = [(rank, rank ^ (1 << step)) for step in range(6) for rank in range(size)]
    found = [paths.between(*pair) for pair in doubling_pairs]
    assert calls == size
    calls = 0
    for rank in reversed(range(1, size)):
        paths.between(0, rank)
    assert calls <= size // 32
    monkeypatch.setattr("oneaccord.schedule.simulation.paths._KEPT", 25)
    few, calls = Paths(network, size), 0
    assert [few.between(*pair) for pair in doubling_pairs] == found
    assert calls > size  # what was dropped is found again


def test_a_rank_outside_of_the_world_is_refused() -> None:
    paths = Paths(NETWORKS["textbook"], 4)
    for pair in ((0, 4), (4, 0), (-1, 0), (0, -1)):
        with pytest.raises(InvalidRankError, match=rf"from rank {pair[0]} to rank {pair[1]}: the ranks are 0 to 3"):
            paths.between(*pair)
    with pytest.raises(InvalidWorldSizeError, match="a world of 0 ranks"):
        Paths(NETWORKS["textbook"], 0)


def test_a_torus_that_does_not_fit_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="need 3"):
        Paths(NETWORKS["torus"].model_copy(update={"dimensions": (2, 2, 2)}), 24)


def test_a_network_is_meant_by_name_file_or_itself(tmp_path: FilePath) -> None:
    file = tmp_path / "rack.toml"
    file.write_text('topology = "wires"\n[wire]\nlatency_s = 1e-6\nbandwidth_bytes_per_s = 1e9\n')
    rack = Network(topology="wires", wire=NetworkLevel(latency_s=1e-6, bandwidth_bytes_per_s=1e9))
    assert Network.resolve("fat-tree") is NETWORKS["fat-tree"]
    assert Network.resolve(file) == Network.resolve(str(file)) == rack
    assert Network.resolve(rack) is rack
    assert Network.resolve(None) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fat_tree", "a file; did you mean 'fat-tree'? Presets are: textbook, fat-tree, torus, laptop"),
        ("LAPTOP", "a file; did you mean 'laptop'? Presets are"),
        ("nets/rack.toml", "a file. Presets are: textbook, fat-tree, torus, laptop"),
    ],
)
def test_a_name_of_no_network_is_refused_with_those_that_there_are(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Network.resolve(name)
    assert f"network = {name!r}: this is neither a preset nor " in str(caught.value)
    assert words in str(caught.value)
    assert (caught.value.key, caught.value.value) == ("network", name)


def test_a_path_object_is_never_the_name_of_a_preset() -> None:
    with pytest.raises(ConfigError, match="torus: the network file cannot be read"):
        Network.resolve(FilePath("torus"))


def programs() -> Iterator[str]:
    yield "import sys, oneaccord.api as api; assert 'numpy' not in sys.modules, 'api'"
    yield "from oneaccord.api import NETWORKS, Jitter, JitterSource, Network, NetworkLevel, Path, Paths"
    yield "assert Paths(NETWORKS['torus'], 2).between(0, 1) == Path((0, 3), (0.7e-6,) * 2, (450e9,) * 2, 1.5e-6, False)"
    yield "assert set(dir(api)) >= {'NETWORKS', 'Jitter', 'JitterSource', 'Network', 'NetworkLevel', 'Path', 'Paths'}"


def test_plugins_find_all_of_it_in_the_api_which_stays_light() -> None:
    subprocess.run([sys.executable, "-c", "\n".join(programs())], check=True, timeout=30)
