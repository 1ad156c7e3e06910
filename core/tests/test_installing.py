"""What to type to install more of manyhands, wherever the running one came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from manyhands.common import installing
from manyhands.common.installing import install_command

PROJECT = """
[project.optional-dependencies]
tcp = ["manyhands-tcp==0.1.0"]
nccl-cuda13 = ["manyhands-nccl==0.1.0", "nccl4py>=0.6"]
lab = ["manyhands-lab==0.1.0"]
conformance = ["manyhands-conformance==0.1.0"]
plot = ["manyhands-lab[plot]==0.1.0"]
all = ["manyhands-core[low-precision]==0.1.0", "manyhands-lab==0.1.0", "manyhands-tcp==0.1.0"]
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
    """Let the running manyhands-core be one that pip installed so (PEP 610); None is a release."""
    info = tmp_path / "site" / "manyhands_core-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: manyhands-core\nVersion: 0.1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(info.parent))


def local(root: Path, **how: object) -> object:
    return {"url": f"file://{quote(str(root))}/core", "dir_info": how}


@pytest.mark.parametrize(
    ("command", "works"),
    [
        ("pip install 'manyhands[tcp]'", "pip install -e 'ROOT/plugins/tcp'"),
        ('pip install "manyhands[plot]" x', "pip install -e 'ROOT/lab[plot]' x"),
        ("pip install manyhands[tcp,plot]", "pip install -e 'ROOT/plugins/tcp' -e 'ROOT/lab[plot]'"),
        ("pip install 'manyhands[lab]'", "pip install -e 'ROOT/lab'"),
        ("pip install 'manyhands[conformance]'", "pip install -e 'ROOT/conformance'"),
        ("pip install 'manyhands-core[cli]'", "pip install -e 'ROOT/core[cli]'"),
        ("a, or 'manyhands[nccl-cuda13]' for b", "a, or -e 'ROOT/plugins/nccl' -e 'ROOT[nccl-cuda13]' for b"),
        ("pip install manyhands-pigeon", "pip install manyhands-pigeon"),
        ("pip install manyhands[star]", "pip install manyhands[star]"),
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

    assert install_command("pip install 'manyhands[all]'") == "pip install './core[low-precision]' ./lab ./plugins/tcp"


@pytest.mark.parametrize(
    "origin",
    [
        None,
        {"url": "https://example.org/manyhands.git", "subdirectory": "core", "vcs_info": {"vcs": "git"}},
        {"url": "file:///wheels/manyhands_core-0.1.0-py3-none-any.whl", "archive_info": {}},
        {"url": "file:///a/clone/that/is/gone/core", "dir_info": {"editable": True}},
    ],
)
def test_else_the_release_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: object) -> None:
    came_from(monkeypatch, tmp_path, origin)

    assert install_command("pip install 'manyhands[tcp]'") == "pip install 'manyhands[tcp]'"
