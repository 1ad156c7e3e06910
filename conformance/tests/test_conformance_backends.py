"""The backends of this repository keep the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from support.peer_worlds import real_ucc

from oneaccord_conformance.pytest import BackendConformance


class TestTcp(BackendConformance):
    backend = "tcp"
    quick = True


class TestShm(BackendConformance):
    backend = "shm"
    quick = True


class TestSimulated(BackendConformance):
    backend = "simulated"
    quick = True


class TestHybrid(BackendConformance):
    backend = "hybrid"
    config: ClassVar = {"ranks_per_host": 2, "backends": {"hybrid": {"routes": {"intra": "shm", "inter": "tcp"}}}}
    quick = True


@pytest.mark.peers
class TestGloo(BackendConformance):
    backend = "gloo"
    ranks = 3
    quick = True


@pytest.mark.peers
class TestMpi(BackendConformance):
    backend = "mpi"
    ranks = 3
    quick = True


@pytest.mark.peers
class TestUcc(BackendConformance):
    backend = "ucc"
    ranks = 3
    quick = True

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def library(cls) -> Iterator[None]:
        with real_ucc():
            yield


@pytest.mark.peers
class TestUcx(BackendConformance):
    backend = "ucx"
    ranks = 3
    quick = True


@pytest.mark.peers
class TestUcxSharedMemory(BackendConformance):
    backend = "ucx"
    config: ClassVar = {"backends": {"ucx": {"transports": ["shm", "tcp"]}}}
    ranks = 3
    quick = True
