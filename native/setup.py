"""The compiled part; what else there is to say stands in pyproject.toml."""

from pathlib import Path

import numpy as np
from setuptools import Extension, setup

SOURCES = Path("src/manyhands_native")

# One wheel for Python 3.11 and all later versions. Where there is no compiler, the package is installed without it, and says so.
core = Extension(
    "manyhands_native._core",
    sources=sorted(map(str, SOURCES.glob("*.c"))),
    depends=[str(SOURCES / "native.h")],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    extra_compile_args=[
        "-std=c11",
        "-O3",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fvisibility=hidden",
        "-fno-trapping-math",
        "-isystem",
        np.get_include(),
    ],
    py_limited_api=True,
    optional=True,
)
setup(ext_modules=[core])
