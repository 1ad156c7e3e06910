"""docs/guides/zeromq.md: its code is that of tests/packages/oneaccord-zeromq, which conforms as a stranger's distribution."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tests" / "packages" / "oneaccord-zeromq"


def test_the_page_shows_the_files_of_the_package() -> None:
    page = (ROOT / "docs" / "guides" / "zeromq.md").read_text()
    shown = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    files = {"pyproject.toml", "src/oneaccord_zeromq/plugin.py", "src/oneaccord_zeromq/backend.py"}
    assert shown == {file: (PACKAGE / file).read_text() for file in files}


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_backend_of_the_page_conforms(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    subprocess.run(["cp", "-r", f"{PACKAGE}/.", str(source)], check=True)  # a build leaves files in the source
    build = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--target", str(site), str(source)], check=True, timeout=30)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")}
    environ["PYTHONPATH"] = str(site)
    command = [sys.executable, "-m", "oneaccord", "check", "zeromq", "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "zeromq conforms" in done.stdout
