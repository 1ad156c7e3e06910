"""Make a virtual environment, .venv unless named, where it is missing or stale, and install a requirements file into it.

If a lock lies beside the requirements file (`requirements-dev.lock` beside `requirements-dev.txt`), all that comes from an index is
installed from the lock first, and pip compares the hash of each file. What the requirements file names then finds everything installed:
no index is asked a second time, and what the lock lacks is an error. `make lock` writes the locks.

A stamp in it, written last, holds a digest of everything the installation depends on: the requirements files, their locks, every
pyproject.toml, the interpreter and the place of the repository. A mark that exists only while pip works tells that an
installation was interrupted; such an environment is made again from nothing. Any other environment is kept and updated.

Usage: python tools/make_venv.py requirements.txt [NAME]
"""

import sys

if sys.version_info < (3, 11):
    # This module must parse under older versions, so that people read this line and no traceback.
    sys.exit(
        "oneaccord needs Python 3.11 or newer, and '%s' is %d.%d; name another one: make PYTHON=python3.11"  # noqa: UP031
        % (sys.executable, sys.version_info[0], sys.version_info[1])
    )

import contextlib
import fcntl
import hashlib
import shlex
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


def included(root: Path, requirements: str) -> list[str]:
    """Return ``requirements`` and the requirements files that it includes."""
    lines = (root / requirements).read_text(encoding="utf-8").splitlines()
    return [requirements, *(line.removeprefix("-r ").strip() for line in lines if line.startswith("-r "))]


def lock_of(root: Path, requirements: str) -> list[Path]:
    """Return the lock beside ``requirements``, if there is one."""
    lock = (root / requirements).with_suffix(".lock")
    return [lock] if lock.exists() else []


def digest(root: Path, requirements: str) -> str:
    """Return the digest of all that an installation of ``requirements`` depends on."""
    projects = [root / "pyproject.toml", *sorted(root.glob("*/pyproject.toml")), *sorted(root.glob("plugins/*/pyproject.toml"))]
    projects += [
        *sorted((root / "native").glob("setup.py")),
        *sorted((root / "native" / "src").glob("*/*.[ch]")),
    ]  # compiled at installation
    state = hashlib.sha256(f"{VERSION}\n{root}\n".encode())
    for file in [root / name for name in included(root, requirements)] + lock_of(root, requirements) + projects:
        state.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return state.hexdigest()


def usable(environment: Path) -> bool:
    """Tell whether ``environment`` holds a working Python of the same version as this one."""
    probe = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [environment / "bin" / "python", "-c", probe], check=True, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return answer.stdout.strip() == VERSION


def create(environment: Path) -> None:
    """Make ``environment`` from nothing, with pip where this Python can (some systems ship venv without ensurepip)."""
    try:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=True).create(environment)
    except subprocess.CalledProcessError:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(environment)


def install(environment: Path, root: Path, requirements: str) -> None:
    """Install ``requirements`` with the environment's own pip, or with this Python's where it has none."""
    python = str(environment / "bin" / "python")
    own = [python, "-m", "pip"]
    has_pip = subprocess.run([*own, "--version"], check=False, capture_output=True).returncode == 0
    pip = own if has_pip else [sys.executable, "-m", "pip", "--python", python]
    # Errors are shown. Warnings tell of this machine's indexes rather than of this repository, and whoever meets an error may ask for them.
    command = [*pip, "install", "-qq", "--disable-pip-version-check"]
    rest = []
    for lock in lock_of(root, requirements):
        subprocess.run([*command, "--require-hashes", "-r", lock.name], cwd=root, check=True)
        # A build in isolation would fetch what it builds with, and compare no hash.
        rest = ["--no-index", "--no-build-isolation"]
    subprocess.run([*command, *rest, "-r", requirements], cwd=root, check=True)


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Let no other process make environments of ``root`` meanwhile: it would take ours for one that was interrupted, and clear it."""
    with (root / "tools" / "make_venv.py").open("rb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another make that installs into this clone", flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def make(root: Path, requirements: str, name: str = ".venv") -> None:
    """Bring the environment ``name`` of ``root`` up to date with ``requirements``; do nothing where it is already.

    Raises
    ------
    subprocess.CalledProcessError
        pip failed; the next call begins from nothing.
    """
    environment = root / name
    unfinished = environment / ".installing"
    stamps = {environment / f".installed-{name}": digest(root, name) for name in included(root, requirements)}
    kept = usable(environment) and not unfinished.exists()
    if kept and all(stamp.exists() and stamp.read_text(encoding="utf-8") == wanted for stamp, wanted in stamps.items()):
        return
    print(
        f"installing {requirements} into {environment.name}; the first time this takes one to three minutes, and longer if the computer is busy",
        flush=True,
    )
    if not kept:
        create(environment)
    unfinished.touch()
    install(environment, root, requirements)
    for stamp, wanted in stamps.items():
        stamp.write_text(wanted, encoding="utf-8")
    unfinished.unlink()


if __name__ == "__main__":
    try:
        with alone(ROOT):
            make(ROOT, *sys.argv[1:3])
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"pip could not install {sys.argv[1]} (exit code {error.returncode}). Its errors stand above.\n"
            "If it found no version of something, look whether this computer reaches its package index. The same command tries again.\n"
            "If it is told not to ask an index, a requirement has changed and its lock has not: `make lock` writes it.\n"
            f"With pip's warnings: {shlex.join(word for word in error.cmd if word != '-qq')}"
        )
