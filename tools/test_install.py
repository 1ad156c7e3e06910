"""Install the distributions of this repository in clean environments, as their users do, and see that they work there.

The parts: `build` makes each wheel and sdist and looks into them; `alone` installs each distribution by itself and with each of its extras;
`readme` types what README.md says; `python` runs tests and the conformance suite on the wheels, with every Python from 3.11 on that is found on
the PATH, by pyenv or by uv; `lowest` does so with the lowest versions that the distributions allow. `make test-install` is the way to run it.

Usage: python tools/test_install.py [PART ...]
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"
OLDEST = "3.11"
TESTED = ["conformance/tests", "core/tests", "lab/tests", "native/tests", "plugins"]
TRAINING = ["parallel/tests"]
TESTED_EVERYWHERE = ["core/tests", "plugins/shm/tests", "plugins/simulated/tests", "plugins/tcp/tests"]
"""What is tested on each Python; the rest on the newest one, and with the lowest versions."""

TEST_TOOLS = ("griffelib", "hatchling", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
HEAVY = ("torch", "cupy")
"""Peers of gigabytes: whether pip could install the extras that bring them is asked, and no more."""

ROUTES = {"ONEACCORD_BACKENDS__HYBRID__ROUTES__INTRA": "shm", "ONEACCORD_BACKENDS__HYBRID__ROUTES__INTER": "tcp"}
CHECKED: dict[str, Mapping[str, str]] = {"tcp": {}, "shm": {}, "simulated": {}, "hybrid": ROUTES}
"""The backends that need neither an MPI nor special hardware, and the settings that they cannot do without."""

WORLD = """
import numpy as np
import oneaccord as oa

with oa.init() as group:
    total = group.all_reduce(np.full(3, group.rank + 1.0))
    assert total.tolist() == [group.world_size * (group.world_size + 1) / 2] * 3
    print(group)
"""

PROBE = """
import importlib, json, pkgutil, sys
from importlib.metadata import distributions
from importlib.resources import files

version, place, origin, *wanted = sys.argv[1:]
found = {each.name: each for each in distributions() if each.name.startswith("oneaccord")}
assert set(wanted) <= set(found), f"{wanted} are not all among {sorted(found)}"
with_commands = {"oneaccord", "oneaccord-lab", "oneaccord-conformance"} & set(found)
lacking = {"jax", "pytest", "ray", "torch"} | (set() if with_commands else {"typer"})  # which extras bring, or the program has


def load(function, *arguments):
    try:
        return function(*arguments)
    except ModuleNotFoundError as error:
        assert error.name in lacking, f"{arguments or function}: {error}"


for name, distribution in found.items():
    assert distribution.version == version, f"{name} is {distribution.version}"
    url = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "an index")
    assert url.startswith(origin), f"{name} comes from {url}: somebody else's has this name"
    for point in distribution.entry_points:
        load(point.load)
    if name == "oneaccord":
        continue  # which holds no code
    package = load(importlib.import_module, {"oneaccord-core": "oneaccord"}.get(name, name.replace("-", "_")))
    if package is None:
        continue  # oneaccord-torch derives from classes of what is lacking
    assert package.__file__.startswith(place), f"{package.__file__} is not in {place}"
    assert (files(package) / "py.typed").is_file(), f"{name} has no py.typed"
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            load(importlib.import_module, module.name)
import oneaccord

assert oneaccord.__version__ == version
print(*(name.removeprefix("oneaccord-") for name in found))
"""


class Failed(Exception):
    """A step has failed; the text says how."""


class Matrix:
    """All steps, what came of them, and the folder in which they work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: list[tuple[str, str, str, float]] = []
        self.projects = {
            path.parent: tomllib.loads(path.read_text(encoding="utf-8"))["project"]
            for path in [
                ROOT / "pyproject.toml",
                *sorted(ROOT.glob("*/pyproject.toml")),
                *sorted(ROOT.glob("plugins/*/pyproject.toml")),
            ]
        }
        self.version = str(self.projects[ROOT]["version"])
        self.world = folder / "world.py"
        self.world.write_text(WORLD, encoding="utf-8")
        self.empty = folder / "empty"
        self.empty.mkdir()
        # What takes distributions from the built wheels alone, or from here, whatever an index has under these names: `oneaccord` there
        # is somebody else's.
        self.constraints, self.versions = folder / "constraints.txt", folder / "versions.txt"

    def constrain(self) -> None:
        """Write what keeps other distributions of these names away, once the wheels are built."""
        names = [str(each["name"]) for each in self.projects.values()]
        self.constraints.write_text("".join(f"{name} @ {self.wheel(name).as_uri()}\n" for name in names), encoding="utf-8")
        self.versions.write_text("".join(f"{name}=={self.version}\n" for name in names), encoding="utf-8")

    def wheel(self, name: str) -> Path:
        """Return where the only wheel of a distribution lies."""
        found = list((self.folder / "dist").glob(f"{name.replace('-', '_')}-{self.version}-*.whl"))
        if len(found) != 1:
            raise Failed(f"{name} has {len(found)} wheels, and not one")
        return found[0]

    @contextmanager
    def step(self, part: str, what: str) -> Iterator[None]:
        """Go through one step, say in a line what came of it, and go on whatever that is."""
        began, fault = time.monotonic(), ""
        try:
            yield
        except (Failed, OSError, subprocess.TimeoutExpired) as error:
            fault = str(error) or repr(error)
        took = time.monotonic() - began
        self.results.append((part, what, fault, took))
        print(f"{'FAILED' if fault else 'ok':6} {took:6.1f} s  {part:7} {what}", flush=True)
        if fault:
            print(textwrap.indent(fault, "    "), flush=True)

    def environment(self, python: str | Path, requirements: Sequence[str], *options: str) -> Path:
        """Make an environment with these requirements, those of this repository from the built wheels; return its Python."""
        place = Path(tempfile.mkdtemp(dir=self.folder, prefix="env-"))
        run([UV, "venv", "--quiet", "--no-project", "--clear", "--python", python, place])
        run(
            [UV, "pip", "install", "--python", place, "--constraints", self.constraints, *options, *requirements],
            cwd=self.empty,
        )
        return place / "bin" / "python"

    def probe(self, python: Path, wanted: Sequence[str] = (), *, editable: bool = False) -> None:
        """See that what is installed can be imported and found, and runs: as a world of one, and of two over each backend."""
        place, origin = (ROOT, ROOT) if editable else (python.parent.parent, self.folder / "dist")
        told = [self.version, f"{place}{os.sep}", origin.as_uri(), *wanted]
        names = run([python, "-I", "-c", PROBE, *told], cwd=self.empty).splitlines()[-1].split()
        expect(run([python, self.world], cwd=self.empty), "rank 0 of 1 over")
        for backend in sorted({"shm", "simulated", "tcp"} & set(names)):
            self.world_of_two(python, backend)

    def world_of_two(self, python: Path, backend: str) -> None:
        """See that two ranks meet over a backend."""
        command: list[str | Path] = [python.with_name("oneaccord"), "run", "-n", "2", "--backend", backend, self.world]
        expect(run(command, cwd=self.empty), f"rank 0 of 2 over {backend}", f"rank 1 of 2 over {backend}")


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    code: int = 0,
    more: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> str:
    """Run a command and return what it printed; its exit code must be ``code``."""
    foreign = ("PYTHON", "ONEACCORD_", "VIRTUAL_ENV", "CONDA", "SLURM_", "PMI", "OMPI_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environ | dict(more or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != code:
        last = "\n".join(done.stdout.splitlines()[-40:])
        raise Failed(
            f"exit code {done.returncode}, and {code} expected, of: {shlex.join(str(word) for word in command)[:300]}\n{last}"
        )
    return done.stdout


def expect(printed: str, *texts: str) -> None:
    """Raise `Failed` unless all texts were printed."""
    for text in texts:
        if text not in printed:
            raise Failed(f"{text!r} was not printed:\n{printed}")


def requirements(project: Mapping[str, Any]) -> list[str]:
    """Return what a distribution needs, its extras included."""
    return [
        *project.get("dependencies", []),
        *(each for extra in project.get("optional-dependencies", {}).values() for each in extra),
    ]


def build(matrix: Matrix) -> None:
    """Build each sdist, and the wheel from it, and look into both."""
    dist = matrix.folder / "dist"
    for folder, project in matrix.projects.items():
        with matrix.step("build", project["name"]):
            run([UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", dist, folder])
            look_inside(folder, matrix.wheel(project["name"]))
    with matrix.step("build", "twine check --strict"):
        matrix.constrain()
        run([sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.glob("*.whl")), *sorted(dist.glob("*.tar.gz"))])


def look_inside(folder: Path, wheel: Path) -> None:
    """See that a wheel holds the files of the package, its licence and what describes it, and nothing else, and its sdist no less."""
    made = re.compile(r"__pycache__|\.egg-info|\.so$")  # by an editable install
    paths = [path.relative_to(folder / "src") for path in (folder / "src").rglob("*") if path.is_file()]
    source = {str(path) for path in paths if not made.search(str(path))}
    to_compile = {name for name in source if name.endswith((".c", ".h"))}
    package = source - to_compile
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    described = {
        f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    }
    held = set(zipfile.ZipFile(wheel).namelist())
    compiled = {name for name in held if name.endswith(".abi3.so")}
    if len(compiled) != bool(to_compile):
        raise Failed(f"{wheel.name} holds {sorted(compiled)} of what is compiled")
    if lost := (package | {f"{info}/licenses/LICENSE"}) - held:
        raise Failed(f"{wheel.name} lacks {sorted(lost)}")
    if strange := held - package - described - compiled:
        raise Failed(f"{wheel.name} holds {sorted(strange)} as well")
    with tarfile.open(wheel.parent / f"{'-'.join(wheel.name.split('-')[:2])}.tar.gz") as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO", *(f"src/{name}" for name in source)}
    if lost := needed - packed:
        raise Failed(f"the sdist lacks {sorted(lost)}")


def alone(matrix: Matrix) -> None:
    """Install each distribution by itself, and with each of its extras."""
    for project in matrix.projects.values():
        extras = project.get("optional-dependencies", {})
        for extra in ["", *extras]:
            name = f"{project['name']}[{extra}]" if extra else project["name"]
            if any(each.startswith(HEAVY) for each in extras.get(extra, [])):
                with matrix.step("alone", f"{name} (resolved only)"):
                    matrix.environment(sys.executable, [name], "--dry-run")
                continue
            with matrix.step("alone", name):
                # The compiled executor depends on nothing, and is of use beside the core alone.
                beside = [] if project.get("dependencies") else ["oneaccord-core"]
                matrix.probe(matrix.environment(sys.executable, [name, *beside]), [project["name"]])
    core_alone(matrix)


def core_alone(matrix: Matrix) -> None:
    """See that core without any backend says what to install for more."""
    script = matrix.world
    with matrix.step("alone", "oneaccord-core says what to install"):
        python = matrix.environment(sys.executable, ["oneaccord-core"])
        command = python.with_name("oneaccord")
        expect(run([command, "doctor"], cwd=matrix.empty, code=2), "pip install 'oneaccord-core[cli]'")
        run([UV, "pip", "install", "--python", python, "--constraints", matrix.constraints, "oneaccord-core[cli]"])
        expect(run([command, "doctor"], cwd=matrix.empty), "no backend is installed", "pip install 'oneaccord[tcp]'")
        for backend in ("auto", "tcp"):
            refused = run([command, "run", "-n", "2", "--backend", backend, script], cwd=matrix.empty, code=2)
            expect(refused, "none", "pip install 'oneaccord[tcp]'")
        refused = run([python, script], cwd=matrix.empty, code=1, more={"ONEACCORD_BACKEND": "shm"})
        expect(refused, "UnknownBackendError", "pip install 'oneaccord[shm]'")
        for name, extra in {
            "bench": "lab",
            "show": "lab",
            "simulate": "lab",
            "show pipeline": "parallel",
            "check": "conformance",
        }.items():
            expect(run([command, *name.split()], cwd=matrix.empty, code=2), f"pip install 'oneaccord[{extra}]'")


def readme(matrix: Matrix) -> None:
    """Type each `pip install` of README.md in an environment of its own."""
    typed = re.findall(r"^ *pip install .*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    for line in typed or [""]:
        words = shlex.split(line, comments=True)
        with matrix.step("readme", shlex.join(words) or "no `pip install` in README.md"):
            if not words:
                raise Failed("nothing was found to type")
            released = "-e" not in words
            python = matrix.environment(sys.executable, ["pip"])
            run([python, "-m", *words], more={"PIP_CONSTRAINT": str(matrix.constraints if released else matrix.versions)})
            matrix.probe(python, editable=not released)
            expect(run([python.with_name("oneaccord"), "doctor"], cwd=matrix.empty), f"oneaccord-core {matrix.version}")
            if {"openmpi", "mpich"} & set(words):
                matrix.world_of_two(python, "mpi")


def test_tools() -> list[str]:
    """Return what the tests need, as requirements-dev.txt pins it."""
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    return ["pip>=25", *(line for line in lines if line.partition("==")[0] in TEST_TOOLS)]


def run_tests(python: Path, folders: Sequence[str], *more: str) -> None:
    """Run the short tests in these folders on what is installed."""
    options = [
        "-n",
        "3",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not peers and not gpu and not engines and not site and not long",
        "--hypothesis-profile=short",
    ]
    run([python, "-m", "pytest", *options, *more, *folders], timeout_s=1800)


def pythons() -> dict[str, Path]:
    """Return each Python from the oldest allowed one on that is here, by its version, the oldest first."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    # In front of pyenv's own stand-ins, which run one version alone.
    path = os.pathsep.join([*map(str, pyenv.glob("versions/*/bin")), os.environ.get("PATH", os.defpath)])
    found = {}
    for minor in range(int(OLDEST.partition(".")[2]), 30):
        command = [str(UV), "python", "find", "--no-project", "--system", f"3.{minor}"]
        answer = subprocess.run(
            command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir()
        )
        if answer.returncode == 0:
            found[f"3.{minor}"] = Path(answer.stdout.strip())
    return found


def python(matrix: Matrix) -> None:
    """Run tests and the conformance suite on the wheels, on each Python."""
    found = pythons()
    for version, path in found.items():
        folders = [*TESTED, *TRAINING] if version == list(found)[-1] else TESTED_EVERYWHERE
        made: list[Path] = []
        with matrix.step("python", f"{version} oneaccord[all,plot], and the tests of {', '.join(folders)}"):
            python = matrix.environment(path, ["oneaccord[all,plot]", *test_tools()])
            made.append(python)
            matrix.probe(python, [str(each["name"]) for each in matrix.projects.values()])
            run_tests(python, folders)
        for backend, settings in CHECKED.items() if made else ():
            with matrix.step("python", f"{version} oneaccord check {backend}"):
                run([made[0].with_name("oneaccord"), "check", backend, "--quick"], cwd=matrix.empty, more=settings)


def lowest(matrix: Matrix) -> None:
    """Run tests with the lowest versions that the distributions allow, of the oldest Python as well."""
    for folder, builder in (("core", "hatchling"), ("native", "setuptools")):
        with matrix.step("lowest", f"{builder} builds oneaccord-{folder}"):
            table = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
            pinned = matrix.folder / f"{builder}.txt"
            pinned.write_text(
                "\n".join(each.replace(">=", "==") for each in table["build-system"]["requires"]), encoding="utf-8"
            )
            run([UV, "build", "--quiet", "--build-constraints", pinned, "--out-dir", matrix.folder / "lowest", ROOT / folder])
    # The training layers apart: they ask for a newer NumPy than the rest.
    for apart, folders in (("oneaccord-parallel", TESTED), ("", TRAINING)):
        with matrix.step("lowest", f"{OLDEST} the tests of {', '.join(folders)}"):
            projects = [project for folder, project in matrix.projects.items() if folder != ROOT and project["name"] != apart]
            names = [str(project["name"]) for project in projects]
            needed = [each for project in projects for each in requirements(project)]
            direct = [each for each in needed if not each.startswith(("oneaccord", "pytest"))]
            python = matrix.environment(pythons()[OLDEST], [*names, *direct, *test_tools()], "--resolution", "lowest-direct")
            matrix.probe(python, names)
            # What they use of a newer Python or of each other may be deprecated by now.
            run_tests(python, folders, "-W", "ignore::DeprecationWarning")


PARTS = {"build": build, "alone": alone, "readme": readme, "python": python, "lowest": lowest}


def main(asked: Sequence[str]) -> int:
    """Go through the parts that are asked for, all by default, and return the exit code."""
    if unknown := set(asked) - set(PARTS):
        print(f"there is no part {sorted(unknown)}: {', '.join(PARTS)}")
        return 2
    with tempfile.TemporaryDirectory(prefix="oneaccord-install-") as folder:
        matrix = Matrix(Path(folder))
        for name, part in PARTS.items():
            if name == "build" or not asked or name in asked:
                part(matrix)
    print(f"\n{'part':7} {'steps':>6} {'failed':>7} {'time':>9}")
    for name in dict.fromkeys(result[0] for result in matrix.results):
        of_it = [result for result in matrix.results if result[0] == name]
        print(f"{name:7} {len(of_it):6} {sum(bool(each[2]) for each in of_it):7} {sum(each[3] for each in of_it):7.0f} s")
    failed = [f"{part}: {what}" for part, what, fault, _ in matrix.results if fault]
    print(*(f"failed: {each}" for each in failed), f"Pythons here: {', '.join(pythons())}", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
