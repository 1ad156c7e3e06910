"""Build the wheel and the sdist of each distribution twice, from the last commit, and see that both times give the same bytes.

The two builds have folders, times of files and temporary folders of their own. What is equal lands in `dist/`, with its hashes in
`dist/SHA256SUMS`; if anything differs, nothing does. `make wheels` is the way to run it.

Usage: python tools/build_wheels.py [FOLDER ...]
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"


def git(root: Path, *arguments: str) -> bytes:
    """Return what git says."""
    command = [shutil.which("git") or sys.exit("git is not installed"), "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout


def folders(root: Path) -> list[Path]:
    """Return the folder of each distribution, from the root."""
    paths = [root / "pyproject.toml", *sorted(root.glob("*/pyproject.toml")), *sorted(root.glob("plugins/*/pyproject.toml"))]
    return [path.parent.relative_to(root) for path in paths]


def build(root: Path, place: Path, names: Sequence[Path], age_s: int) -> Path:
    """Build the distributions of the last commit in ``place``, from files that are ``age_s`` older than it; return where they are."""
    date = int(git(root, "log", "-1", "--format=%ct"))
    source, dist, scratch = place / "source", place / "dist", place / "tmp"
    scratch.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(git(root, "archive", "HEAD"))) as archive:
        archive.extractall(source, filter="data")
    for path in source.rglob("*"):
        os.utime(path, (date - age_s, date - age_s))
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(date), "TMPDIR": str(scratch), "PYTHONHASHSEED": str(age_s % 100)}
    for name in names:
        command: list[str | Path] = [UV, "build", "--quiet", "--no-config", "--no-build-isolation", "--python", sys.executable]
        subprocess.run([*command, "--out-dir", dist, source / name], check=True, env=environ)
        print(f"built {name} in {place.name}", flush=True)
    return dist


def parts(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel or an sdist, by name, with what describes them."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {
                each.filename: repr(each).encode() + str(each.date_time).encode() + wheel.read(each)
                for each in wheel.infolist()
            }
    with tarfile.open(path) as sdist:
        found = {}
        for each in sdist.getmembers():
            data = sdist.extractfile(each)
            found[each.name] = f"{each.mtime} {each.mode} {each.uid} {each.uname}".encode() + (data.read() if data else b"")
        return found


def differences(first: Path, second: Path) -> list[str]:
    """Return what differs between two folders of distributions, in words."""
    names = sorted({path.name for folder in (first, second) for path in folder.iterdir() if not path.name.startswith(".")})
    found = []
    for name in names:
        one, other = first / name, second / name
        if not (one.exists() and other.exists()):
            found.append(f"{name} was built once only")
        elif one.read_bytes() != other.read_bytes():
            left, right = parts(one), parts(other)
            inside = sorted(part for part in left.keys() | right.keys() if left.get(part) != right.get(part))
            found.append(f"{name} differs in {', '.join(inside) or 'how it is packed'}")
    return found


def main(asked: Sequence[str]) -> int:
    """Build, compare, and keep what is equal; return the exit code."""
    names = [Path(name) for name in asked] or folders(ROOT)
    if changed := git(ROOT, "status", "--porcelain").decode().splitlines():
        print(f"{len(changed)} files differ from the last commit, and are built as they stand there: {changed[0][3:]} ...")
    with tempfile.TemporaryDirectory(prefix="oneaccord-wheels-") as temporary:
        place = Path(temporary)
        first, second = build(ROOT, place / "once", names, 0), build(ROOT, place / "a second time", names, 86_400)
        if found := differences(first, second):
            print(*found, sep="\n")
            return 1
        target = ROOT / "dist"
        target.mkdir(exist_ok=True)
        for old in target.iterdir():
            old.unlink()
        sums = []
        for path in sorted(first.glob("*-*")):
            data = path.read_bytes()
            (target / path.name).write_bytes(data)
            sums.append(f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")
        (target / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    print(f"{len(sums)} files in dist/, built twice with the same bytes")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"a build failed (exit code {error.returncode}); what it printed stands above\n{(error.stderr or b'').decode()}"
        )
