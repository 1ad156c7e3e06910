"""Check that one module spells the names of oneaccord' environment variables, so that each has one meaning, and nobody a list of his own.

Usage: python tools/check_variables.py [ROOT]

What counts: a text in the source of a distribution that is the name of a variable and nothing else. Words for people may name one.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

OWNER = Path("core/src/oneaccord/common/variables.py")
EXEMPT = (Path("plugins/torch/src/oneaccord_torch_autoload/__init__.py"),)
"""Runs in each process that imports torch, and so imports nothing itself."""
NAME = re.compile(r"ONEACCORD_[A-Z0-9_]+")


def check(root: Path) -> list[str]:
    """Return every fault in the repository at ``root``, as lines of ``path:line: what is wrong``."""
    faults: list[str] = []
    for path in sorted(root.glob("**/src/**/*.py")):
        place = path.relative_to(root)
        if place == OWNER or place in EXEMPT or any(part.startswith(".") for part in place.parts):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and NAME.fullmatch(str(node.value))]
        faults += [
            f"{place}:{node.lineno}: {node.value!r}: take it from {OWNER.as_posix()}, by Variable or of_setting"
            for node in names
        ]
    return faults


if __name__ == "__main__":
    found = check(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    print("\n".join(found) or "variables: each is spelled in one place")
    sys.exit(bool(found))
