"""The programs of all engines, in an allocation of a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.engine_programs import *  # noqa: F403 - the tests
from support.engine_programs import Engine

import oneaccord as oa

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def engine(slurm: Any) -> Iterator[Engine]:
    """Let this process be within an allocation of two hosts, as a notebook that Slurm has started is."""
    file = slurm.folder / "allocation.env"
    held = slurm.start(
        "salloc", "-Q", "-N2", "--ntasks-per-node=2", "sh", "-c", f'env -0 > "{file}.new"; mv "{file}.new" "{file}"; cat'
    )
    with pytest.MonkeyPatch.context() as patch:
        slurm.until(file.exists)
        patch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
        for pair in file.read_text().split("\0"):
            name, _, value = pair.partition("=")
            if name.startswith("SLURM_"):
                patch.setenv(name, value)
        refusals = [
            ({"n": 5}, oa.UsageError, "too few for 5 ranks"),
            ({"gpus": 1}, oa.UsageError, "has 0 GPUs on"),
        ]
        yield Engine("slurm", refusals=refusals)
    held.communicate(timeout=45)
    slurm.until_empty()
