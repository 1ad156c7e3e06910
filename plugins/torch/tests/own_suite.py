"""torch's own suite of tests for backends, as tests of oneaccord; `test_torch_suite.py` runs it in a process of its own.

The suite knows torch's backends by their names alone. So that nothing is skipped which Gloo, or MPI where Gloo cannot, must do, the name of
ours equals theirs.
"""

import os
import tempfile


class Name(str):
    __slots__ = ()

    def __eq__(self, other):
        return str.__eq__(self, other) or other in ("gloo", "mpi")

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash("gloo")


class Variables(dict):
    """Variables whose values may be more than text."""


os.environ.update(
    BACKEND="mpi",  # asked by the tests of groups alone, which want 8 ranks for any other
    WORLD_SIZE="4",
    TEMP_DIR=tempfile.mkdtemp(),
    INIT_METHOD="env://",
    OMP_NUM_THREADS="1",
    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60",
    MASTER_ADDR="127.0.0.1",
)

import torch  # noqa: E402 - the suite reads its variables as it is imported
import torch.testing._internal.common_distributed as common  # noqa: E402

import oneaccord_torch  # noqa: E402, F401 - registers the backend

torch.set_num_threads(1)
common.DistTestCases.backend_feature["plugin"].add("oneaccord")
real = os.environ
setattr(os, "environ", Variables({**real, "BACKEND": Name("oneaccord")}))  # noqa: B010 - a variable of the process holds plain text
try:
    from torch.testing._internal.distributed import distributed_test
finally:
    setattr(os, "environ", real)  # noqa: B010


class TestOneaccord(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)  # to spawn them takes ten times as long
