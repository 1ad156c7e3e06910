"""What the tests of the built site share."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).resolve().parents[2] / "build" / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not (SITE / "index.html").exists():
        pytest.fail("build/site holds no site; `make docs` builds it")
    playwright = importlib.import_module("playwright.sync_api").sync_playwright().start()
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    except Exception as error:
        playwright.stop()
        pytest.fail(f"no Chromium can be started; `apt-get install chromium` brings one: {error}")
    yield started
    started.close()
    playwright.stop()
