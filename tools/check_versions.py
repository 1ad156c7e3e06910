"""Check that the distributions of this repository move in lockstep: one version, pins to it, one licence, listed everywhere.

Usage: python tools/check_versions.py [ROOT]
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

SHARED_KEYS = ("version", "requires-python", "license")


def projects(root: Path) -> dict[Path, dict[str, Any]]:
    """Return the ``[project]`` table of each distribution, by its folder; the root's comes first."""
    folders = [
        root,
        root / "core",
        root / "conformance",
        root / "lab",
        root / "native",
        root / "parallel",
        *sorted(path.parent for path in root.glob("plugins/*/pyproject.toml")),
    ]
    return {folder: tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"] for folder in folders}


def requirements(project: dict[str, Any]) -> list[str]:
    """Return all requirements of a distribution, those of its extras included."""
    return [
        *project.get("dependencies", []),
        *(item for extra in project.get("optional-dependencies", {}).values() for item in extra),
    ]


def check(root: Path) -> list[str]:
    """Return every fault in the repository at ``root``, one a line."""
    found = projects(root)
    main = found[root]
    local = {project["name"] for project in found.values()}
    editable = (root / "requirements.txt").read_text(encoding="utf-8")
    faults = []
    for folder, project in found.items():
        where = f"{folder.relative_to(root) / 'pyproject.toml'}"
        faults += [
            f"{where}: {key} is {project.get(key)!r}, and {main.get(key)!r} in the root"
            for key in SHARED_KEYS
            if project.get(key) != main.get(key)
        ]
        for requirement in requirements(project):
            name = re.split(r"[\[=<>!~; ]", requirement, maxsplit=1)[0]
            if name in local and not requirement.endswith(f"=={main['version']}"):
                faults.append(f"{where}: {requirement!r} must be pinned to =={main['version']}")
        if (folder / "LICENSE").read_bytes() != (root / "LICENSE").read_bytes():
            faults.append(f"{where}: LICENSE beside it differs from the root's")
        if folder not in (root, root / "core"):
            if not any(item.startswith(project["name"]) for item in main["optional-dependencies"].get(folder.name, [])):
                faults.append(f"pyproject.toml: no extra {folder.name!r} that brings {project['name']}")
            if not any(item.startswith(project["name"]) for item in main["optional-dependencies"]["all"]):
                faults.append(f"pyproject.toml: the extra 'all' leaves out {project['name']}")
            if f"-e ./{folder.relative_to(root)}" not in editable:
                faults.append(f"requirements.txt: ./{folder.relative_to(root)} is not installed")
    return faults


if __name__ == "__main__":
    faults_found = check(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    print("\n".join(faults_found) or "versions: all distributions are in lockstep")
    sys.exit(1 if faults_found else 0)
