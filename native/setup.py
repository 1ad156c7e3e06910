"""The compiled part; what else there is to say stands in pyproject.toml."""

import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

SOURCES = Path("src/oneaccord_native")

# What makes a mistake in C harder to use. Level 3 of _FORTIFY_SOURCE needs GCC 12 or Clang 9; older ones take it for 2.
HARDENED = [
    ["-fstack-protector-strong"],
    ["-fstack-clash-protection"],
    ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"],  # some compilers have set another one
    ["-fcf-protection"],  # x86
    ["-mbranch-protection=standard"],  # Arm
]
LINKED = ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"] if sys.platform == "linux" else []


class Build(build_ext):
    """Takes what the compiler at hand knows, and leaves no folder of this machine in the module."""

    def build_extensions(self) -> None:
        """Choose the flags, and build."""
        probe = Path(self.build_temp) / "probe.c"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("int probe(int number) { return number; }\n", encoding="ascii")
        for flags in HARDENED:
            command = [*self.compiler.compiler_so, *flags, "-O3", "-Werror", "-c", probe, "-o", probe.with_suffix(".o")]
            try:
                known = subprocess.run(command, capture_output=True, check=False).returncode == 0
            except OSError:  # there is no compiler, which the build itself finds out
                known = False
            if known:
                for extension in self.extensions:
                    extension.extra_compile_args += flags
        # A Python that is built for one folder has its modules look for libraries there first. This one needs libc alone.
        self.compiler.linker_so = [word for word in self.compiler.linker_so if not word.startswith("-Wl,-rpath")]
        super().build_extensions()


class Pack(sdist):
    """Writes the same bytes each time, where SOURCE_DATE_EPOCH says of which time."""

    def make_archive(self, *arguments, **more) -> str:
        """Pack, and pack again without what this machine and this minute add."""
        path = super().make_archive(*arguments, **more)
        date = os.environ.get("SOURCE_DATE_EPOCH")
        if date is None:
            return path
        with tarfile.open(path) as packed:
            files = [(each, packed.extractfile(each)) for each in sorted(packed.getmembers(), key=lambda each: each.name)]
            plain = io.BytesIO()
            with tarfile.open(fileobj=plain, mode="w") as again:
                for each, data in files:
                    each.mtime, each.mode = int(date), 0o755 if each.mode & 0o100 else 0o644
                    each.uid = each.gid = 0
                    each.uname = each.gname = ""
                    each.pax_headers = {}
                    again.addfile(each, data)
        Path(path).write_bytes(gzip.compress(plain.getvalue(), mtime=int(date)))
        return path


# One wheel for Python 3.11 and all later versions. Where there is no compiler, the package is installed without it, and says so.
core = Extension(
    "oneaccord_native._core",
    sources=sorted(map(str, SOURCES.glob("*.c"))),
    depends=[*sorted(map(str, SOURCES.glob("*.h"))), "setup.py"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    extra_compile_args=[
        "-std=c11",
        "-O3",
        "-g0",  # it would name the folders of the build, and no two would be equal
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fvisibility=hidden",
        "-fno-trapping-math",
        "-isystem",
        np.get_include(),
    ],
    extra_link_args=LINKED,
    py_limited_api=True,
    optional=True,
)
setup(ext_modules=[core], cmdclass={"build_ext": Build, "sdist": Pack})
