"""`benchmarks/nccl_stub.py`: what a launch costs above libraries that do nothing; here, whether it can be measured."""

from __future__ import annotations

import re
from pathlib import Path

from support import preloaded
from support.fake_gpu import through_libcuda, through_nccl4py


def test_it_measures_and_prints(repository: Path) -> None:
    through_nccl4py.real_binding()  # skips the test where this cannot be
    through_libcuda.library()
    done = preloaded.run(
        [repository / "benchmarks" / "nccl_stub.py", "--rounds", "2", "--calls", "3"], cwd=repository, timeout_s=60
    )
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert first == "medians of 2 turns of 3 calls:"
    pattern = re.compile(r" *(raw|launch|launch alone) +\d+\.\d{3} us +\d+\.\d\d of raw")
    assert [found[1] for row in rows if (found := pattern.fullmatch(row))] == ["raw", "launch", "launch alone"], rows
