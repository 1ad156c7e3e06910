"""Test the compiled executor under sanitizers, and what it does in its other form, Python.

The parts: `address` builds it with AddressSanitizer and UndefinedBehaviorSanitizer and runs its tests, `thread` does so with ThreadSanitizer, and
`python` runs the tests of calls with the compiled form switched off. It needs gcc and Python's headers. `make test-native` is the way to run it.

Usage: python tools/test_native.py [PART ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "native" / "src" / "oneaccord_native"
SANITIZERS = {"address": ("address,undefined", ["asan", "ubsan"]), "thread": ("thread", ["tsan"])}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps memory until the end
    "UBSAN_OPTIONS": "halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1 suppressions={}",
}
# The C library frees the memory of threads that have ended, without a lock that ThreadSanitizer could see.
SUPPRESSED = "race:_dl_deallocate_tls\n"
CALLS = ["plugins/shm/tests", "plugins/tcp/tests", "conformance/tests/test_conformance_backends.py", "tests"]
TESTS = [
    "-q",
    "-p",
    "no:cacheprovider",
    "-m",
    "not peers and not gpu and not engines and not site and not long",
    "--hypothesis-profile=short",
]


def run_tests(*arguments: str, more: Mapping[str, str]) -> bool:
    """Run tests; tell whether they pass."""
    command = [sys.executable, "-m", "pytest", *TESTS, *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **more}, check=False).returncode == 0


def sanitized(part: str, folder: Path) -> bool:
    """Build the compiled part with a sanitizer, and test it; tell whether all is well."""
    flags, libraries = SANITIZERS[part]
    package = folder / "oneaccord_native"
    package.mkdir()
    for name in ("__init__.py", "mailbox.h"):
        shutil.copy(SOURCE / name, package)
    compiler = shutil.which("gcc") or sys.exit("gcc is not installed")
    command = [compiler, "-shared", "-fPIC", "-g", "-O1", "-fno-omit-frame-pointer", f"-fsanitize={flags}", "-std=c11"]
    command += [
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fno-trapping-math",
        "-DPy_LIMITED_API=0x030B0000",
        f"-I{sysconfig.get_paths()['include']}",
    ]
    command += ["-isystem", np.get_include()]
    subprocess.run([*command, *map(str, SOURCE.glob("*.c")), "-o", package / "_core.abi3.so"], check=True)
    found = [
        subprocess.run([compiler, f"-print-file-name=lib{name}.so"], check=True, capture_output=True, text=True).stdout.strip()
        for name in libraries
    ]
    suppressions = folder / "suppressions"
    suppressions.write_text(SUPPRESSED)
    more = {name: value.format(suppressions) for name, value in OPTIONS.items()}
    # What setup.py adds when it builds, this build has not.
    return run_tests(
        "native/tests",
        "--ignore=native/tests/test_native_hardened.py",
        more={**more, "LD_PRELOAD": " ".join(found), "PYTHONPATH": str(folder)},
    )


def main(parts: list[str]) -> int:
    """Run the parts; return the exit code."""
    failed = []
    for part in parts or [*SANITIZERS, "python"]:
        print(f"--- {part}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            if not (
                run_tests("-n", "2", *CALLS, more={"ONEACCORD_NATIVE": "false"})
                if part == "python"
                else sanitized(part, Path(folder))
            ):
                failed.append(part)
    print(f"failed: {', '.join(failed)}" if failed else "all parts are well")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
