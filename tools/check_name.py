"""Check that nothing tracked in this repository bears the project's former name, which belongs to others on the package index.

Usage: python tools/check_name.py [ROOT]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FORMER = re.compile(rb"many[-_. ]?hands(?! make)", re.IGNORECASE)  # "many hands make light work" is a motto, and not a name


def check(root: Path) -> list[str]:
    """Return every place that bears the former name, one a line."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True).stdout  # noqa: S607
    faults = []
    for name in filter(None, listed.split(b"\0")):
        path = root / name.decode()
        if FORMER.search(name):
            faults.append(f"{name.decode()}: the file's name is the former one")
        if not path.is_file():  # removed, and not yet committed
            continue
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if FORMER.search(line):
                faults.append(f"{name.decode()}:{number}: {line.strip()[:80].decode(errors='replace')}")
    return faults


if __name__ == "__main__":
    faults_found = check(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    print("\n".join(faults_found) or "name: the former name is nowhere")
    sys.exit(1 if faults_found else 0)
