"""Ranks as actors of a real Ray cluster of two nodes: what only Ray promises; test_ray_programs.py has the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

import oneaccord as oa

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
LONG_S = 120.0


def node(group: oa.Group) -> str:
    import ray

    return str(ray.util.get_node_ip_address())


@pytest.fixture(autouse=True)
def by_value(cluster: Any) -> Iterator[None]:
    """Send the functions of this file by value: actors cannot import it."""
    import cloudpickle

    this = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this)
    yield
    cloudpickle.unregister_pickle_by_value(this)


def test_ray_ranks_of_a_node_are_neighbours() -> None:
    nodes = oa.launch(node, 4, on="ray", options={"cpus": 0.5}, timeout_s=LONG_S, per_host=2)
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_ray_processors_of_ranks_are_reserved_and_given_back() -> None:
    """Each of the two launches takes all processors of the cluster."""
    options = {"cpus": 2, "strategy": "STRICT_SPREAD"}
    for _ in range(2):
        first, second = oa.launch(node, 2, on="ray", options=options, timeout_s=LONG_S)
        assert first != second
    with (
        oa.Ranks(2, on="ray", options=options),
        pytest.raises(oa.DeadlineError, match="because others use what its nodes have"),
    ):
        oa.launch(node, 1, on="ray", timeout_s=3)


def test_ray_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(oa.UsageError, match=r"cpu: Extra inputs.*There are: address, cpus"):
        oa.launch(node, 1, on="ray", options={"cpu": 1})
