"""The programs of all engines, on hosts with real ssh servers."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_programs import *  # noqa: F403 - the tests
from support.engine_programs import Engine

import oneaccord as oa

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def engine(servers: Any) -> Engine:
    refusals = [
        ({"n": 5}, oa.UsageError, "5 ranks do not fit"),
        ({"gpus": 1}, oa.UsageError, "GPUs"),
    ]
    return Engine("ssh", {"config_file": servers.config, "hosts": ["host1:1", "host2:3"]}, refusals)
