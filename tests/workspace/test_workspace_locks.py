"""The locks: what is installed from an index has the hash that stands there, and a lock holds all that its requirements file brings."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.scripts import module_of

LOCKED = ["requirements-audit", "requirements-dev", "requirements-docs", "requirements-install"]


def entries(lock: Path) -> list[Requirement]:
    """What a lock names; each line that begins one is followed by its hashes."""
    text = lock.read_text(encoding="utf-8").replace("\\\n", "")
    return [Requirement(line.partition("--hash=")[0]) for line in text.splitlines() if not line.startswith("#")]


def asked(repository: Path, requirements: Path) -> list[Requirement]:
    """What a requirements file brings from outside: its own lines, and what the distributions that it names depend on."""
    found = []
    for line in requirements.read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            found += asked(repository, repository / line.removeprefix("-r ").strip())
        elif line.startswith("-e "):
            folder, _, extras = line.removeprefix("-e ").removesuffix("]").partition("[")
            project = tomllib.loads((repository / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            texts = [*project.get("dependencies", [])]
            texts += [text for extra in extras.split(",") if extra for text in project["optional-dependencies"][extra]]
            found += [Requirement(text) for text in texts if not text.startswith("oneaccord")]
        elif line and not line.startswith("#"):
            found.append(Requirement(line))
    return found


@pytest.mark.parametrize("name", LOCKED)
def test_a_lock_holds_a_version_that_fits_each_requirement(repository, name):
    locked: dict[str, list[Requirement]] = {}
    for entry in entries(repository / f"{name}.lock"):
        locked.setdefault(canonicalize_name(entry.name), []).append(entry)
    wanted = asked(repository, repository / f"{name}.txt")
    assert len(wanted) >= 5
    unmet = [
        str(each)
        for each in wanted
        if not locked.get(canonicalize_name(each.name))
        or not all(each.specifier.contains(str(entry.specifier)[2:]) for entry in locked[canonicalize_name(each.name)])
    ]
    assert unmet == [], "`make lock` writes the locks"


@pytest.mark.parametrize("name", LOCKED)
def test_a_lock_has_hashes_for_each_version_and_names_no_address(repository, name):
    text = (repository / f"{name}.lock").read_text(encoding="utf-8")
    assert all(re.fullmatch(r"==[^,*]+", str(entry.specifier)) for entry in entries(repository / f"{name}.lock"))
    versions = [line for line in text.replace("\\\n", "").splitlines() if not line.startswith("#")]
    assert [line[:60] for line in versions if not re.search(r"( +--hash=sha256:[0-9a-f]{64})+$", line)] == []
    assert re.findall(r"://|^-.*", text, re.MULTILINE) == []


def wheel(folder: Path, name: str) -> str:
    """Write a distribution of one empty module; return its hash."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as made:
        made.writestr(f"{name}.py", "")
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    return hashlib.sha256((folder / f"{name}-1.0-py3-none-any.whl").read_bytes()).hexdigest()


@pytest.mark.long
@pytest.mark.timeout(300)  # it starts pip four times, which a busy machine may take long for
def test_make_installs_what_has_the_hash_of_the_lock_and_nothing_else(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    environment, requirements = tmp_path / "env", tmp_path / "requirements-some.txt"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(environment)
    install = module_of(repository / "tools" / "make_venv.py").install
    true, changed = wheel(tmp_path, "true_file"), "0" * 64

    def lock(digest: str, rest: str = "") -> None:
        requirements.write_text(f"true_file==1.0\n{rest}", encoding="utf-8")
        here = f"--no-index\n--find-links {tmp_path}\n"
        requirements.with_suffix(".lock").write_text(f"{here}true_file==1.0 --hash=sha256:{digest}\n", encoding="utf-8")

    def installed() -> list[str]:
        return [path.name for path in environment.glob("lib/*/site-packages/*_file.py")]

    lock(changed)
    with pytest.raises(subprocess.CalledProcessError):
        install(environment, tmp_path, requirements.name)
    assert installed() == []

    wheel(tmp_path, "other_file")
    lock(true, "other_file==1.0\n")  # which the lock has forgotten
    with pytest.raises(subprocess.CalledProcessError) as failure:
        install(environment, tmp_path, requirements.name)
    assert "--no-index" in failure.value.cmd
    assert installed() == ["true_file.py"]
