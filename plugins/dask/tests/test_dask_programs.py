"""The programs of all engines, in the workers of a real Dask cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.engine_programs import *  # noqa: F403 - the tests
from support.engine_programs import LONG_S, Engine, by_value

import oneaccord as oa

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[Engine]:
    from distributed import Client

    with Client(cluster) as client, by_value():
        client.wait_for_workers(3, timeout=LONG_S)
        address = str(client.scheduler.address)
        refusals = [
            ({"gpus": 1}, oa.UsageError, '--resources "GPU=1"'),
            ({"n": 40, "timeout_s": 2.0}, oa.DeadlineError, "has 3 suitable workers, and not the 40"),
            ({"options": {"workers": ["tcp://127.0.0.1:1"] * 2}}, oa.UsageError, "must name 2 different workers"),
        ]
        yield Engine(
            "dask",
            {"address": address},
            refusals,
            r"rank 1 of 2 was lost: the Dask worker tcp://.* has ended",
            shows_output=False,
            recover=lambda: client.wait_for_workers(3, timeout=LONG_S),
        )
