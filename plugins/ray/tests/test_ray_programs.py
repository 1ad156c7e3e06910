"""The programs of all engines, on a real Ray cluster of two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.engine_programs import *  # noqa: F403 - the tests
from support.engine_programs import Engine, by_value

import oneaccord as oa

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[Engine]:
    refusals = [
        (
            {"options": {"cpus": 64}},
            oa.UsageError,
            r"can never place 2 times \{'CPU': 64.0\}.*nodes have \{'CPU': 2.0\}, \{'CPU': 2.0\}",
        ),
        ({"gpus": 1}, oa.UsageError, r"can never place 2 times \{.*'GPU': 1.0\}"),
        ({"n": 3, "per_host": 2}, oa.UsageError, "per_host=2 does not divide 3 ranks"),
    ]
    # Ray merges like lines of several ranks otherwise.
    setup = (
        f'os.environ["RAY_DEDUP_LOGS"] = "0"; import ray; ray.init(address={cluster.address!r}, _node_ip_address="127.0.0.5")'
    )
    with by_value():
        yield Engine("ray", {"cpus": 0.25}, refusals, r"rank 1 of 2( on .*)? was lost: ", setup, repeats_output=True)
