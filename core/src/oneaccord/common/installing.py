"""The command that installs more of oneaccord."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final

__all__ = ["install_command"]

_PART: Final = re.compile(r"""(['"]?)(oneaccord(?:-core)?)\[([\w,-]+)\]\1""")
_OWN: Final = re.compile(r"['\"]?oneaccord-(\w+)(\[[\w,-]+\])?")


def install_command(command: str) -> str:
    """Return a pip command as it works here.

    If pip installed oneaccord from a folder, its other distributions are beside it, and need not be released: the command then uses
    their paths instead of ``oneaccord[EXTRA]``, and is unchanged otherwise.

    Parameters
    ----------
    command
        Such as ``pip install 'oneaccord[tcp]'``; other words may stand around it.
    """
    found = _checkout()
    if found is None:
        return command
    return _PART.sub(lambda match: _by_folders(*found, match), command)


def _by_folders(root: Path, option: str, part: re.Match[str]) -> str:
    """Name the folders of all that a part consists of, so that pip looks for no release of it."""
    import shlex

    brought = [part[0]]
    if part[2] == "oneaccord":
        import tomllib

        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
        extras = project.get("optional-dependencies", {})
        brought = [each for extra in part[3].split(",") for each in extras.get(extra, [])]
    own = [match for match in map(_OWN.match, brought) if match]
    folders = [f"/{'plugins/' if (root / 'plugins' / match[1]).is_dir() else ''}{match[1]}{match[2] or ''}" for match in own]
    if len(own) < len(brought):  # something from elsewhere, too, which the extra knows
        folders.append(f"[{part[3]}]")
    here = "." if root.samefile(".") else str(root)
    return " ".join(option + shlex.quote(here + folder) for folder in dict.fromkeys(folders)) or part[0]


@functools.cache
def _checkout() -> tuple[Path, str] | None:
    """Return the folder with the source of this oneaccord, and how pip installed from it (PEP 610)."""
    # Imported here, because it is needed only if something is missing.
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(distribution("oneaccord-core").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return None
    url = urlsplit(str(origin.get("url", "")))
    root = Path(unquote(url.path)).parent
    if url.scheme != "file" or "dir_info" not in origin or not (root / "pyproject.toml").is_file():
        return None
    return root, "-e " if origin["dir_info"].get("editable") else ""
