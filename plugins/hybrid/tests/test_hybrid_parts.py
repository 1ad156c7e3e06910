"""The parts of a hybrid backend: when they are made and ended, and which of them gets what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oneaccord.api import UnsupportedError
from oneaccord_hybrid.routing import RoutedTransport

Composer = Callable[..., Any]


def test_parts_are_made_in_one_order_each_once_and_that_of_cuda_last(composed: Composer) -> None:
    by_device = composed(cuda="gpu", p2p="c", barrier="b", cpu="a")
    assert by_device.log == ["make a", "make b", "make c", "make gpu"]
    by_place = composed(cuda="gpu", p2p="far", barrier="b", inter="far", intra="near")
    assert by_place.log == ["make near", "make far", "make b", "make gpu"]


def test_parts_are_closed_in_reverse_and_aborted_all(composed: Composer) -> None:
    hybrid = composed(cpu="a", barrier="b", cuda="gpu")
    del hybrid.log[:]
    hybrid.backend.abort()
    hybrid.backend.close()
    assert hybrid.log == ["abort a", "abort b", "abort gpu", "close gpu", "close b", "close a"]


@pytest.mark.parametrize("sulks", ["a", "b", "gpu"])
def test_one_that_raises_keeps_no_other_from_being_aborted_and_closed(composed: Composer, sulks: str) -> None:
    hybrid = composed(cpu="a", barrier="b", cuda="gpu", sulks=sulks)
    del hybrid.log[:]
    with pytest.raises(RuntimeError, match=f"{sulks} does not like to abort"):
        hybrid.backend.abort()
    with pytest.raises(RuntimeError, match=f"{sulks} does not like to close"):
        hybrid.backend.close()
    assert hybrid.log == ["abort a", "abort b", "abort gpu", "close gpu", "close b", "close a"]


@pytest.mark.parametrize("sulks", ["", "b"])
def test_when_one_does_not_start_those_before_it_are_ended_and_its_error_is_raised(bootstrap: Composer, sulks: str) -> None:
    from oneaccord_hybrid.backend import HybridBackend

    given = bootstrap(cpu="a", barrier="b", cuda="gpu", fails="gpu", sulks=sulks)
    with pytest.raises(RuntimeError, match="gpu does not start"):
        HybridBackend(given)
    assert given.log == ["make a", "make b", "abort a", "abort b", "close b", "close a"]


def test_a_world_of_one_needs_the_part_of_cuda_alone(composed: Composer) -> None:
    assert composed([0], 0, cpu="a", p2p="b", cuda="gpu").log == ["make gpu"]
    assert composed([0], 0, intra="a", inter="b").log == []


def test_parts_are_found_by_their_names(composed: Composer) -> None:
    backend = composed(cpu="a", cuda="gpu").backend
    assert [backend.part(name).name for name in ("a", "gpu")] == ["a", "gpu"]
    assert backend.part("hybrid") is None


@pytest.mark.parametrize(
    ("routes", "memory"),
    [
        ({"cpu": "a"}, {"cpu"}),
        ({"intra": "a", "inter": "b"}, {"cpu"}),
        ({"cuda": "gpu"}, {"cuda"}),
        ({"cpu": "a", "cuda": "gpu"}, {"cpu", "cuda"}),
        ({"cpu": "both", "cuda": "both"}, {"cpu", "cuda"}),
    ],
)
def test_it_moves_the_memory_that_it_has_routes_for(composed: Composer, routes: dict[str, str], memory: set[str]) -> None:
    assert composed(**routes).backend.memory == memory


def test_calls_go_by_their_channel(composed: Composer) -> None:
    backend = composed(cpu="a", p2p="b", barrier="c", cuda="gpu").backend
    assert [backend.open_transport(channel).name for channel in (0, 1, 6, 7)] == ["a 0", "b 1", "a 6", "b 7"]
    assert backend.open_barrier(6).name == "c 6"
    assert backend.open_device(4, None) == "the device channel 4 of gpu"


def test_by_default_all_calls_in_host_memory_go_one_way(composed: Composer) -> None:
    backend = composed(cpu="a").backend
    assert [backend.open_transport(channel).name for channel in (0, 1)] == ["a 0", "a 1"]
    assert backend.open_barrier(0) is None
    assert composed(cpu="a", barrier="a").backend.open_barrier(0) is None


@pytest.mark.parametrize(("hosts", "name"), [((0, 0, 0), "near"), ((0, 1, 2), "far")])
def test_where_all_are_on_one_host_or_each_on_its_own_there_is_one_way(composed: Composer, hosts: Any, name: str) -> None:
    backend = composed(hosts, 1, intra="near", inter="far").backend
    assert backend.open_transport(0).name == f"{name} 0"
    assert backend.open_transport(1).name == f"{name} 1"


@pytest.mark.parametrize(
    ("hosts", "rank", "ranks"),
    [((0, 0, 1, 1), 2, (2, 3)), ((5, 9, 5, 9), 0, (0, 2)), ((0, 0, 1), 2, (2,)), ((0, 0), 1, (0, 1))],
)
def test_what_serves_hosts_alone_knows_the_ranks_of_its_host(composed: Composer, hosts: Any, rank: int, ranks: Any) -> None:
    backend = composed(hosts, rank, intra="near", inter="far").backend
    assert backend.part("near").ranks == ranks
    assert backend.part("far").ranks == tuple(range(len(hosts)))


@pytest.mark.parametrize("route", ["barrier", "p2p", "inter"])
def test_what_serves_more_than_hosts_knows_all_ranks(composed: Composer, route: str) -> None:
    backend = composed(**{"intra": "near", "inter": "far", route: "near"}).backend
    assert backend.part("near").ranks == (0, 1, 2, 3)


def test_each_peer_is_reached_by_place_under_the_number_that_it_has_there(composed: Composer) -> None:
    hybrid = composed(intra="near", inter="far")
    transport = hybrid.backend.open_transport(4)
    assert isinstance(transport, RoutedTransport)
    del hybrid.log[:]
    transport.connect([0, 1, 3], None)
    assert hybrid.log == ["connect near 4 to [1]", "connect far 4 to [0, 1]"]
    transport.close()
    assert hybrid.log[2:] == ["close near 4", "close far 4"]


def test_barriers_by_one_of_the_ways_share_its_transport_which_is_closed_once(composed: Composer) -> None:
    hybrid = composed(intra="near", inter="far", barrier="far")
    collectives, barriers = hybrid.backend.open_transport(2), hybrid.backend.open_barrier(2)
    del hybrid.log[:]
    collectives.close()
    barriers.close()
    assert hybrid.log == ["close near 2", "close far 2"]
    hybrid.backend.open_transport(2).close()
    assert hybrid.log[2:] == ["close near 2", "close far 2"]


def test_memory_comes_from_the_part_for_host_memory(composed: Composer) -> None:
    assert bytes(composed(cpu="a", p2p="b").backend.allocate(7)) == b"a 7"
    assert bytes(composed(intra="near", inter="far").backend.allocate(7)) == b"near 7"
    assert composed(cuda="gpu").backend.allocate(7) is None


def test_without_a_route_there_is_no_way(composed: Composer) -> None:
    with pytest.raises(UnsupportedError, match="no route for arrays in host memory: add cpu, or intra and inter"):
        composed(cuda="gpu").backend.open_transport(0)
    with pytest.raises(UnsupportedError, match="no route for arrays on GPUs: add cuda"):
        composed(cpu="a").backend.open_device(0, None)
