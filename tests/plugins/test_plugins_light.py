"""What lists the backends, and asks each whether it can run, pays for none of the libraries behind them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import oneaccord_gloo.plugin, oneaccord_mpi.plugin, oneaccord_nccl.plugin, oneaccord_ucc.plugin, oneaccord_ucx.plugin

for name in ("gloo", "mpi", "nccl", "ucc", "ucx"):
    spec = sys.modules[f"oneaccord_{name}.plugin"].oneaccord_register_backends()
    spec.probe()
    assert (spec.name, spec.auto_priority) == (name, None), spec
    assert name == "ucc" or f"oneaccord[{name}]" in spec.install, spec
imported = {name.partition(".")[0] for name in sys.modules}
assert not imported & {"numpy", "torch", "mpi4py", "cupy", "nccl"}, imported
with open("/proc/self/maps") as maps:
    mapped = maps.read()
assert not [library for library in ("libucp", "libucc") if library in mapped]
"""


def test_backends_are_described_without_their_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
