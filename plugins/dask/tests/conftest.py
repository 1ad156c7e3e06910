"""A Dask cluster of three workers, each a process, on this host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Return the cluster."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=3, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, protocol="tcp") as made:
        yield made


@pytest.fixture
def client(cluster: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a client, with all workers there; functions of the test's file travel by value, as workers cannot import it."""
    import cloudpickle
    from distributed import Client

    this = sys.modules[request.module.__name__]
    cloudpickle.register_pickle_by_value(this)
    with Client(cluster) as made:
        made.wait_for_workers(3, timeout=120)
        yield made
    cloudpickle.unregister_pickle_by_value(this)
