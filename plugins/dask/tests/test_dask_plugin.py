"""The plugin where Dask is not installed."""

from __future__ import annotations

import sys

import pytest

import oneaccord as oa
from oneaccord.api import describe_launcher


def test_dask_that_is_not_installed_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in {"distributed", "oneaccord_dask"}]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "distributed", None)
    spec = describe_launcher("dask")
    assert (spec.kind, spec.probe()) == ("workers", "the package distributed is not installed")
    with pytest.raises(oa.BackendUnavailableError, match="the package distributed is not installed; try: pip install"):
        oa.launch(print, 2, on="dask")
