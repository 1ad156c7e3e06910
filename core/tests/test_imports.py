"""What ``import oneaccord`` and the first group load, and what the import weighs."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

PROGRAM = """
import sys

def resident():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))

def loaded():
    names = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
    return sorted(name for name in names if not name.startswith("_sysconfigdata"))

before, kibibytes = set(sys.modules), resident()
import oneaccord
assert resident() - kibibytes < 8 * 1024, f"{resident() - kibibytes} KiB"
print(*loaded())
with oneaccord.init():
    print(*loaded())
"""


def test_an_import_loads_nothing_else_and_a_group_only_what_it_needs(
    run_python: Callable[..., CompletedProcess[str]],
) -> None:
    done = run_python("-c", PROGRAM)

    assert (done.returncode, done.stderr) == (0, "")
    imported, grouped = (set(line.split()) for line in done.stdout.splitlines())
    assert imported == {"oneaccord"}
    plugins = {name for name in grouped if name.startswith("oneaccord_")}
    own = {"oneaccord", "typing_extensions"}  # which msgspec takes where it is there
    of_cython = {name for name in grouped if "cython" in name}  # with older ones of NumPy
    of_pydantic = {"annotated_types", "pydantic_core", "typing_inspection"}
    assert grouped - plugins - own - of_cython - of_pydantic == {"msgspec", "numpy", "pluggy", "pydantic"}
    assert not plugins & {"oneaccord_conformance", "oneaccord_lab", "oneaccord_parallel"}
