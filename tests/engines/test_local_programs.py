"""The programs of all engines, on processes of this host."""

from __future__ import annotations

import pytest
from support.engine_programs import *  # noqa: F403 - the tests
from support.engine_programs import Engine

import oneaccord as oa

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    refusals = [
        ({"per_host": 1}, oa.UsageError, "this is one host"),
        ({"gpus": 100}, oa.UsageError, r"need 200 GPUs, and this host has \d+"),
    ]
    return Engine("local", refusals=refusals)
