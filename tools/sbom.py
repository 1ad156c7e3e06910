"""Write `dist/sbom.cdx.json` (CycloneDX): what an installation of all distributions in `dist/` consists of.

They are installed into an environment of their own, with the versions and hashes of `requirements-dev.lock`, which are those that the tests ran
with. The peers that an extra brings (torch, CuPy, mpi4py and others) are not in it. `make sbom` is the way to run it, after `make wheels`.

Usage: python tools/sbom.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent


def main() -> int:
    """Install, and write; return the exit code."""
    dist = ROOT / "dist"
    found = [re.match(r"(\w+)-([^-]+)-", path.name) for path in sorted(dist.glob("*.whl"))]
    wheels = {match[1].replace("_", "-"): match[2] for match in found if match}
    if "oneaccord" not in wheels:
        print(f"{dist} has no wheels of all distributions: `make wheels` builds them")
        return 1
    with tempfile.TemporaryDirectory(prefix="oneaccord-sbom-") as folder:
        python = Path(folder) / "bin" / "python"
        subprocess.run([TOOLS / "uv", "venv", "--quiet", "--no-project", "--python", sys.executable, folder], check=True)
        install: list[str | Path] = [
            TOOLS / "uv",
            "pip",
            "install",
            "--quiet",
            "--no-config",
            "--python",
            python,
            "--find-links",
            dist,
        ]
        # Ours come from here alone: an index may have something else under these names.
        ours = [f"{name}=={version}" for name, version in wheels.items()]
        subprocess.run([*install, "--no-index", "--no-deps", *ours], check=True)
        everything = f"oneaccord[all]=={wheels['oneaccord']}"
        subprocess.run([*install, "--constraints", ROOT / "requirements-dev.lock", everything, *ours], check=True)
        target = dist / "sbom.cdx.json"
        options: list[str | Path] = [
            "--output-reproducible",
            "--validate",
            "--pyproject",
            ROOT / "pyproject.toml",
            "--mc-type",
            "library",
        ]
        subprocess.run([TOOLS / "cyclonedx-py", "environment", *options, "--output-file", target, python], check=True)
    print(f"{target.relative_to(ROOT)} is written")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"this failed (exit code {error.returncode}); what it printed stands above: {error.cmd[0]}")
