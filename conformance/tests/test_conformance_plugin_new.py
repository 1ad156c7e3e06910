"""`oneaccord plugin new`: what it writes works as a stranger's distribution, and what it cannot write it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oneaccord.cli.main import main

PATIENCE_S = 280.0


def new(*words: str) -> int:
    try:
        return main(["plugin", "new", *words])
    except SystemExit as end:
        return int(end.code or 0)


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python outside the repository, with the packages of ``site``."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")}
    environ["PYTHONPATH"] = str(site)
    return subprocess.run(
        [sys.executable, *words], cwd=site.parent, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the new distribution, installed from its wheel; the source stands beside it."""
    return installed(tmp_path_factory.mktemp("new"), "carrier-dove")


def installed(folder: Path, *words: str) -> Path:
    assert new(*words, "--folder", str(folder / "source")) == 0
    build = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--target", str(folder / "site"), str(folder / "source")], check=True, timeout=PATIENCE_S)
    return folder / "site"


def test_a_new_distribution_is_whole_and_bears_its_name_alone(site: Path) -> None:
    source = site.parent / "source"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {
        ".github/workflows/test.yml",
        "README.md",
        "pyproject.toml",
        "src/oneaccord_carrier_dove/py.typed",
        "tests/test_conformance.py",
    } <= files
    assert not [file for file in files if "pigeon" in file or "pigeon" in (source / file).read_text()]


def test_a_new_distribution_is_listed_and_runs(site: Path) -> None:
    doctor = run(site, "-m", "oneaccord", "doctor")
    line = next(line for line in doctor.stdout.splitlines() if "carrier-dove" in line)
    assert "one socket for each pair of ranks" in line, doctor.stdout
    (site.parent / "program.py").write_text(
        "import numpy as np, oneaccord as oa\n"
        "with oa.init() as group:\n"
        "    print(group.backend_name, group.all_reduce(np.ones(3)))\n"
    )
    done = run(site, "-m", "oneaccord", "run", "-n", "4", "--backend", "carrier-dove", "program.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("carrier-dove [4. 4. 4.]") == 4


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_tests_of_a_new_distribution_pass(site: Path) -> None:
    done = run(site, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(site.parent / "source" / "tests"))
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.long
def test_the_types_of_a_new_distribution_are_complete(site: Path) -> None:
    done = run(site, "-m", "mypy", "--strict", "--no-incremental", "-p", "oneaccord_carrier_dove")
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a new launcher of a kind, as `site`."""
    return installed(tmp_path_factory.mktemp("launcher"), "wild-geese", "--launcher", *request.param)


def test_a_new_launcher_is_one_of_hosts_by_default(tmp_path: Path) -> None:
    texts = []
    for words in ([], ["--kind", "hosts"]):
        folder = tmp_path / "-".join(["new", *words])
        assert new("wild-geese", "--launcher", *words, "--folder", str(folder)) == 0
        texts.append({path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()})
    assert texts[0] == texts[1]


KINDS = [(), ("--kind", "workers")]


@pytest.mark.parametrize("launcher", KINDS, ids=["hosts", "workers"], indirect=True)
def test_a_new_launcher_runs_ranks(launcher: Path) -> None:
    site, source = launcher, launcher.parent / "source"
    files = [path for path in source.rglob("*") if path.is_file()]
    assert source / "src" / "oneaccord_wild_geese" / "launcher.py" in files
    assert not [path for path in files if any(word in path.read_text() for word in ("pigeon", "heron", "stork"))]
    assert "launcher wild-geese: " in run(site, "-m", "oneaccord", "doctor").stdout
    (site.parent / "program.py").write_text(
        "import oneaccord as oa\n"
        "def total(group):\n"
        "    return sum(group.all_gather_object(group.rank))\n"
        "if __name__ == '__main__':\n"
        "    print(oa.launch(total, 3, on='wild-geese', timeout_s=60))\n"
    )
    done = run(site, "program.py")
    assert (done.returncode, done.stdout) == (0, "[3, 3, 3]\n"), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("launcher", KINDS, ids=["hosts", "workers"], indirect=True)
def test_the_tests_of_a_new_launcher_pass(launcher: Path) -> None:
    tests = run(
        launcher, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(launcher.parent / "source" / "tests")
    )
    assert tests.returncode == 0, tests.stdout
    assert " passed" in tests.stdout


@pytest.mark.parametrize("launcher", [()], ids=["hosts"], indirect=True)
def test_a_new_launcher_of_hosts_runs_programs(launcher: Path) -> None:
    site = launcher
    (site.parent / "hello.py").write_text("import oneaccord as oa\nwith oa.init() as group:\n    print(group.world_size)\n")
    done = run(site, "-m", "oneaccord", "run", "--on", "wild-geese", "-n", "3", "--hosts", "a:1,b:2", "hello.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, [f"[{rank}] 3" for rank in range(3)]), done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--launcher", "local"), "the name 'local' is taken"),
        (("--launcher", "ssh"), "the name 'ssh' is taken"),
        (("--launcher", "Geese"), "'Geese' cannot be the name of a launcher"),
        (("--kind", "workers", "geese"), "--kind workers is for a launcher: give --launcher too"),
    ],
)
def test_a_new_launcher_that_cannot_be_is_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new(*words, "--folder", str(tmp_path / "new")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["Dove", "2doves", "white dove", "dove-", "dove--white", "döve", "../dove", ""])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new("--folder", str(tmp_path / "new"), "--", name) == 2
    assert f"{name!r} cannot be the name of a backend: it must consist of small letters" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["tcp", "auto", "conformance"])
def test_a_name_that_is_taken_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new(name, "--folder", str(tmp_path / "new")) == 2
    assert f"the name {name!r} is taken" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_with_files_and_a_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    assert new("dove", "--folder", str(tmp_path)) == 2
    assert "exists and is not empty; name another folder" in capsys.readouterr().err
    assert new("dove", "--folder", str(kept)) == 2
    assert "kept cannot be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "mine"
