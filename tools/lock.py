"""Write the locks: for each requirements file that has one, all that it brings from an index, with the version and the hashes of each.

A lock holds for every Python and platform that the distributions do, so it names all files of each release. The distributions of this
repository are not in it; they are installed from here. `make lock` is the way to run it, after each change of a requirement.

Usage: python tools/lock.py [--upgrade] [FILE ...]
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"
LOCKED = ("requirements-audit.txt", "requirements-dev.txt", "requirements-docs.txt", "requirements-install.txt")
HEADER = "# Written by `make lock`, from {}. Do not edit.\n"


def distributions(root: Path) -> list[str]:
    """Return the names of the distributions of this repository."""
    paths = [root / "pyproject.toml", *sorted(root.glob("*/pyproject.toml")), *sorted(root.glob("plugins/*/pyproject.toml"))]
    return [tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"] for path in paths]


def lock(root: Path, requirements: str, more: Sequence[str] = ()) -> None:
    """Write the lock of a requirements file; what it holds and still fits stays as it is, unless ``more`` asks to upgrade.

    Raises
    ------
    subprocess.CalledProcessError
        uv found no versions that fit each other, or does not reach its index.
    """
    oldest = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"].removeprefix(
        ">="
    )
    target = (root / requirements).with_suffix(".lock")
    # Nothing of this computer may get into the file: neither its indexes nor its paths.
    options = ["--universal", "--generate-hashes", "--python-version", oldest, "--no-header", "--no-annotate", "--quiet"]
    options += ["--no-emit-index-url", "--no-emit-find-links", "--no-config"]
    options += [word for name in distributions(root) for word in ("--no-emit-package", name)]
    subprocess.run([UV, "pip", "compile", *options, *more, "--output-file", target.name, requirements], cwd=root, check=True)
    target.write_text(HEADER.format(requirements) + target.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    words = sys.argv[1:]
    upgrade = [word for word in words if word == "--upgrade"]
    try:
        for name in [word for word in words if word not in upgrade] or LOCKED:
            lock(ROOT, name, upgrade)
            print(f"{Path(name).with_suffix('.lock')} is written")
    except subprocess.CalledProcessError as error:
        sys.exit(f"uv could not write it (exit code {error.returncode}). Its errors stand above.")
