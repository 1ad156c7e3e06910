"""What to type to install more of oneaccord, wherever the running one came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from oneaccord.api import UsageError, describe_launcher
from oneaccord.common import installing
from oneaccord.common.installing import install_command
from oneaccord.engines import registry

PROJECT = """
[project.optional-dependencies]
tcp = ["oneaccord-tcp==0.1.0"]
nccl-cuda13 = ["oneaccord-nccl==0.1.0", "nccl4py>=0.6"]
lab = ["oneaccord-lab==0.1.0"]
conformance = ["oneaccord-conformance==0.1.0"]
plot = ["oneaccord-lab[plot]==0.1.0"]
all = ["oneaccord-core[low-precision]==0.1.0", "oneaccord-lab==0.1.0", "oneaccord-tcp==0.1.0"]
"""


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    installing._checkout.cache_clear()
    yield
    installing._checkout.cache_clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout; its path is one that a shell and an address must quote."""
    root = tmp_path / "a clone"
    for plugin in ("nccl", "tcp"):
        (root / "plugins" / plugin).mkdir(parents=True)
    (root / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    return root


def came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: object) -> None:
    """Let the running oneaccord-core be one that pip installed so (PEP 610); None is a release."""
    info = tmp_path / "site" / "oneaccord_core-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oneaccord-core\nVersion: 0.1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(info.parent))


def local(root: Path, **how: object) -> object:
    return {"url": f"file://{quote(str(root))}/core", "dir_info": how}


@pytest.mark.parametrize(
    ("command", "works"),
    [
        ("pip install 'oneaccord[tcp]'", "pip install -e 'ROOT/plugins/tcp'"),
        ('pip install "oneaccord[plot]" x', "pip install -e 'ROOT/lab[plot]' x"),
        ("pip install oneaccord[tcp,plot]", "pip install -e 'ROOT/plugins/tcp' -e 'ROOT/lab[plot]'"),
        ("pip install 'oneaccord[lab]'", "pip install -e 'ROOT/lab'"),
        ("pip install 'oneaccord[conformance]'", "pip install -e 'ROOT/conformance'"),
        ("pip install 'oneaccord-core[cli]'", "pip install -e 'ROOT/core[cli]'"),
        ("a, or 'oneaccord[nccl-cuda13]' for b", "a, or -e 'ROOT/plugins/nccl' -e 'ROOT[nccl-cuda13]' for b"),
        ("pip install oneaccord-pigeon", "pip install oneaccord-pigeon"),
        ("pip install oneaccord[star]", "pip install oneaccord[star]"),
    ],
)
def test_a_checkout_installs_from_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path, command: str, works: str
) -> None:
    came_from(monkeypatch, tmp_path, local(root, editable=True))

    assert install_command(command) == works.replace("ROOT", str(root))


def test_paths_are_short_within_the_checkout_and_plain_where_it_is_not_editable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path
) -> None:
    came_from(monkeypatch, tmp_path, local(root))
    monkeypatch.chdir(root)

    assert install_command("pip install 'oneaccord[all]'") == "pip install './core[low-precision]' ./lab ./plugins/tcp"


@pytest.mark.parametrize(
    "origin",
    [
        None,
        {"url": "https://example.org/oneaccord.git", "subdirectory": "core", "vcs_info": {"vcs": "git"}},
        {"url": "file:///wheels/oneaccord_core-0.1.0-py3-none-any.whl", "archive_info": {}},
        {"url": "file:///a/clone/that/is/gone/core", "dir_info": {"editable": True}},
    ],
)
def test_else_the_release_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: object) -> None:
    came_from(monkeypatch, tmp_path, origin)

    assert install_command("pip install 'oneaccord[tcp]'") == "pip install 'oneaccord[tcp]'"


@pytest.mark.parametrize(("name", "install"), [("slurm", "'oneaccord[slurm]'"), ("pbs", "'oneaccord[slurm]'")])
def test_a_launcher_that_is_not_installed_says_how_it_is(monkeypatch: pytest.MonkeyPatch, name: str, install: str) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda **_group: [])

    with pytest.raises(UsageError) as raised:
        describe_launcher(name)

    assert str(raised.value) == f"there is no launcher {name!r}; install it with: {install_command(f'pip install {install}')}"
