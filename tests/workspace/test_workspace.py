"""The repository as a whole: lockstep versions, extras, the size of files, the environment that make builds."""

from __future__ import annotations

import fcntl
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from support.scripts import module_of

from oneaccord.config.plugins.installed import install_hint

MAX_LINES = 600
PROJECTS = [
    "core",
    "conformance",
    "lab",
    "native",
    "parallel",
    "plugins/dask",
    "plugins/gloo",
    "plugins/hybrid",
    "plugins/kubernetes",
    "plugins/mpi",
    "plugins/nccl",
    "plugins/ray",
    "plugins/shm",
    "plugins/simulated",
    "plugins/slurm",
    "plugins/ssh",
    "plugins/tcp",
    "plugins/torch",
    "plugins/ucc",
    "plugins/ucx",
]


def table(path: Path) -> dict[str, object]:
    return tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    """The files of the repository that say what is installed."""
    for name in [".", *PROJECTS]:
        target = tmp_path / "copy" / name
        target.mkdir(parents=True, exist_ok=True)
        for file in ["pyproject.toml", "LICENSE"]:
            shutil.copy(repository / name / file, target)
    for file in ["requirements.txt", "requirements-dev.txt"]:
        shutil.copy(repository / file, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def faults(repository: Path) -> Callable[[Path], list[str]]:
    """What the checker of versions finds in a tree."""
    return module_of(repository / "tools" / "check_versions.py").check


def test_all_distributions_are_in_lockstep(repository, faults):
    assert faults(repository) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("plugins/tcp/pyproject.toml", 'version = "0.1.0"', 'version = "0.1.1"', "version is '0.1.1', and '0.1.0' in the root"),
        ("plugins/tcp/pyproject.toml", "core==0.1.0", "core>=0.1.0", "'oneaccord-core>=0.1.0' must be pinned to ==0.1.0"),
        ("core/pyproject.toml", ">=3.11", ">=3.12", "requires-python is '>=3.12'"),
        ("pyproject.toml", 'tcp = ["oneaccord-tcp', 'net = ["oneaccord-tcp', "no extra 'tcp' that brings oneaccord-tcp"),
        (
            "pyproject.toml",
            '0", "oneaccord-tcp==0.1.0", "oneaccord-torch',
            '0", "oneaccord-torch',
            "the extra 'all' leaves out oneaccord-tcp",
        ),
        ("requirements.txt", "-e ./plugins/tcp", "", "requirements.txt: ./plugins/tcp is not installed"),
        ("requirements.txt", "-e ./lab", "", "requirements.txt: ./lab is not installed"),
        ("pyproject.toml", 'lab = ["oneaccord-lab', 'bench = ["oneaccord-lab', "no extra 'lab' that brings oneaccord-lab"),
        ("core/LICENSE", "Apache", "A Patchy", "LICENSE beside it differs"),
    ],
)
def test_each_way_of_losing_step_is_found(faults, copy, file, old, new, said):
    text = (copy / file).read_text(encoding="utf-8")
    assert old in text
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    assert said in "\n".join(faults(copy))


def test_the_extras_that_the_readme_promises_exist(repository):
    assert {"tcp", "simulated", "low-precision", "conformance", "lab", "parallel", "plot", "all"} <= set(
        table(repository)["optional-dependencies"]
    )
    assert {"cli", "low-precision"} <= set(table(repository / "core")["optional-dependencies"])


def test_what_is_to_be_typed_to_install_works_in_a_clone(repository):
    """Each command names folders and extras that are there; each README has one for a clone."""
    readmes = [repository / name / "README.md" for name in PROJECTS]
    typed = {
        page: [
            line.strip() for line in page.read_text(encoding="utf-8").splitlines() if line.strip().startswith("pip install ")
        ]
        for page in [repository / "README.md", *repository.glob("docs/*.md"), *readmes]
    }
    for page in readmes:
        assert any("-e ./" in line or '-e "./' in line for line in typed[page]), page
    for line in {line for lines in typed.values() for line in lines if "oneaccord[" in line or "./" in line}:
        words = shlex.split(line, comments=True)[2:]
        places = [after for before, after in pairwise(words) if before == "-e"]
        places += [word.removeprefix("oneaccord") for word in words if word.startswith("oneaccord[")]
        assert places, line
        for place in places:
            folder, _, extras = place.removesuffix("]").partition("[")
            project = table(repository / folder)
            assert project["name"], line
            assert set(filter(None, extras.split(","))) <= set(project.get("optional-dependencies", {})), line


def test_each_plugin_is_found_by_its_entry_point(repository):
    assert table(repository / "plugins/tcp")["entry-points"] == {"oneaccord": {"tcp": "oneaccord_tcp.plugin"}}
    assert table(repository / "plugins/simulated")["entry-points"] == {
        "oneaccord": {"simulated": "oneaccord_simulated.plugin"},
        "pytest11": {"oneaccord_simulated": "oneaccord_simulated.pytest_plugin"},
    }


def test_the_commands_of_the_lab_and_of_the_training_layers_are_found_by_entry_points(repository):
    assert table(repository / "lab")["entry-points"] == {
        "oneaccord.commands": {
            "bench.overlap": "oneaccord_lab.commands.bench_overlap:bench_overlap",
            **{name: f"oneaccord_lab.commands.{name}:{name}" for name in ("bench", "show", "simulate")},
        }
    }
    assert table(repository / "conformance")["entry-points"] == {
        "oneaccord.commands": {
            "check": "oneaccord_conformance.commands.check:check",
            "check.launcher": "oneaccord_conformance.commands.launcher:check_launcher",
            "plugin.new": "oneaccord_conformance.commands.plugin:new",
        }
    }
    assert table(repository / "parallel")["entry-points"] == {
        "oneaccord.commands": {"show.pipeline": "oneaccord_parallel.commands.show_pipeline:show_pipeline"}
    }


def test_who_names_a_backend_of_the_repository_that_is_not_installed_is_told_what_installs_it(repository):
    paths = [path.parent for path in (repository / "plugins").glob("*/pyproject.toml")]
    names = sorted(path.name for path in paths if "oneaccord" in table(path)["entry-points"])
    assert len(names) > 8
    assert [name for name in names if not install_hint(name)] == []


def test_every_package_is_typed(repository):
    packages = [
        path for project in PROJECTS for path in (repository / project / "src").glob("oneaccord*") if path.suffix != ".egg-info"
    ]
    assert len({path.parent for path in packages}) == len(PROJECTS)
    assert [path for path in packages if not (path / "py.typed").exists()] == []


def test_no_source_file_is_over_600_lines(repository):
    folders = ["core", "conformance", "lab", "native", "parallel", "plugins", "tools", "examples", "benchmarks", "tests"]
    sources = [path for folder in folders for path in (repository / folder).rglob("*.py")]
    assert len(sources) > 20
    lengths = {str(path.relative_to(repository)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def make_venv(run_python, root: Path) -> subprocess.CompletedProcess[str]:
    return run_python(root / "tools" / "make_venv.py", "requirements-dev.txt", timeout_s=200)


@pytest.fixture
def installed(repository: Path, tmp_path: Path) -> Path:
    """A repository whose requirements are empty, with the environment made for them."""
    for name in ["tools/make_venv.py", "core/pyproject.toml", "pyproject.toml", "requirements.txt", "requirements-dev.txt"]:
        (tmp_path / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / name).write_text("", encoding="utf-8")
    shutil.copy(repository / "tools" / "make_venv.py", tmp_path / "repo" / "tools")
    (tmp_path / "repo" / "requirements-dev.txt").write_text("-r requirements.txt\n", encoding="utf-8")
    return tmp_path / "repo"


@pytest.mark.long
@pytest.mark.timeout(900)  # pip unpacks itself twice
def test_make_builds_its_environment_once_and_again_when_it_is_stale_or_was_interrupted(run_python, installed):
    (installed / "requirements.txt").write_text("./missing\n", encoding="utf-8")
    failed = make_venv(run_python, installed)
    assert failed.returncode != 0
    assert "pip could not install requirements-dev.txt (exit code 1). Its errors stand above." in failed.stderr
    assert "ERROR: " in failed.stderr
    assert f"{installed}/.venv/bin/python -m pip install --disable-pip-version-check -r requirements-dev.txt" in failed.stderr
    remains = installed / ".venv" / "remains"
    remains.touch()

    (installed / "requirements.txt").write_text("", encoding="utf-8")
    finished = make_venv(run_python, installed)
    assert (finished.returncode, "installing requirements-dev.txt" in finished.stdout) == (0, True), finished.stderr
    assert not remains.exists(), "an environment that was left unfinished must be made from nothing"
    assert make_venv(run_python, installed).stdout == ""

    remains.touch()
    (installed / "core" / "pyproject.toml").write_text("# changed\n", encoding="utf-8")
    assert "installing" in make_venv(run_python, installed).stdout
    assert remains.exists(), "an environment that is merely stale must be kept"
    assert make_venv(run_python, installed).stdout == ""


def test_make_waits_for_another_make_of_the_same_clone(installed):
    """Two at once would clear each other's environment."""
    tool = installed / "tools" / "make_venv.py"
    code = "import make_venv, pathlib, sys\nwith make_venv.alone(pathlib.Path(sys.argv[1])): print('alone', flush=True)"
    with tool.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-c", code, installed]
        with subprocess.Popen(command, cwd=tool.parent, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "waiting for another make that installs into this clone\n"
            fcntl.flock(held, fcntl.LOCK_UN)
            assert other.stdout.readline() == "alone\n"
    assert other.returncode == 0


STUCK = """
import ctypes

def stuck():
    lock = ctypes.PyDLL(None).PyThread_allocate_lock
    lock.restype = ctypes.c_void_p
    mine = ctypes.c_void_p(lock())
    while True:
        ctypes.pythonapi.PyThread_acquire_lock(mine, 1)  # the second time for ever, and holding on to the interpreter
"""


@pytest.mark.parametrize(
    "workers", [pytest.param([], id="in this process"), pytest.param(["-n", "1"], marks=pytest.mark.long, id="in a worker")]
)
@pytest.mark.parametrize(
    "test",
    [
        "def test_it(): stuck()",
        "import pytest\n@pytest.fixture\ndef left():\n    yield\n    stuck()\ndef test_it(left): assert False",
    ],
    ids=["the test", "what comes after a failure"],
)
def test_a_test_that_is_stuck_where_no_signal_helps_ends(repository, run_python, tmp_path, workers, test):
    shutil.copy(repository / "conftest.py", tmp_path)
    (tmp_path / "test_stuck.py").write_text(STUCK + test)
    options = ["-p", "no:cacheprovider", "-c", repository / "pyproject.toml", "--rootdir", tmp_path, "--confcutdir", tmp_path]
    answer = run_python("-m", "pytest", *options, "-o", "timeout=2", *workers, "test_stuck.py")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "Timeout (0:00:02.500000)!" in answer.stderr
    assert 'test_stuck.py", line 9 in stuck' in answer.stderr
    if workers:
        assert "crashed while running 'test_stuck.py::test_it'" in answer.stdout


@pytest.mark.timeout(300)  # it starts pytest, which a busy machine may take long for
def test_the_last_lines_of_a_run_say_what_to_do(repository, run_python, tmp_path):
    shutil.copy(repository / "conftest.py", tmp_path)
    test = """
import pytest
@pytest.mark.parametrize("x", [pytest.param(1, id="a b"), 2])
def test_it(x): assert x == 2
@pytest.mark.skip(reason="what is lacking")
def test_skipped(): pass
@pytest.mark.gpu
def test_gpu(): pass
@pytest.mark.peers
@pytest.mark.long
def test_peer(): pass
"""
    (tmp_path / "test_some.py").write_text(test)
    options = ["-p", "no:cacheprovider", "-c", repository / "pyproject.toml", "--rootdir", tmp_path, "--confcutdir", tmp_path]
    answer = run_python("-m", "pytest", *options, "-n", "1", "test_some.py", timeout_s=200)
    lines = answer.stdout.splitlines()
    python = sys.executable
    assert [line for line in lines if line.startswith(("Skipped", "Left out", "Failed", "Do they", "the output"))] == [
        "Skipped, for what this computer or a backend does not have: 1 (-rs tells why)",
        "Left out: 1 that need a GPU (make test-gpu), 1 that need torch, MPI, UCX, UCC or CuPy (make test-peers)",
        f"Failed tests alone:     {python} -m pytest 'test_some.py::test_it[a b]'",
        f"Do they fail each time? {python} tools/test_flaky.py --runs 5 --tests test_some.py",
        f"the output of:          {Path(python).with_name('oneaccord')} doctor",
    ], answer.stdout + answer.stderr
    assert "what is lacking" not in answer.stdout


def test_tests_that_run_in_the_background_start_programs_that_can_be_interrupted(repository):
    program = """
import runpy, signal, subprocess, sys
runpy.run_path("conftest.py")
subprocess.run([sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"])
"""
    command = ["/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", program]
    assert subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout == "True\n"
