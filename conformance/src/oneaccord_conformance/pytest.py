"""The suite as tests of pytest: a class for each backend.

::

    from oneaccord_conformance.pytest import BackendConformance


    class TestPigeon(BackendConformance):
        backend = "pigeon"

Each check is one test, ``test_CHAPTER_NAME``. A backend that cannot keep a promise yet says so, and why::

        @pytest.mark.xfail(strict=True, reason="the loft takes one letter at a time")
        def test_async_many_in_flight(self, worlds):
            super().test_async_many_in_flight(worlds)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest

from oneaccord_conformance.registry import Check, all_checks
from oneaccord_conformance.running import run_check
from oneaccord_conformance.worlds import WorldMaker

__all__ = ["BackendConformance"]


class BackendConformance:
    """The checks of the suite, one test for each; derive a class whose name begins with ``Test``.

    Attributes
    ----------
    backend
        The backend's name.
    config
        The content of a ``oneaccord.toml``, or the name of such a file.
    ranks
        How many ranks worlds have; at least 2.
    quick
        Whether checks try fewer sizes and dtypes.
    """

    backend: ClassVar[str]
    config: ClassVar[Mapping[str, Any] | str | None] = None
    ranks: ClassVar[int] = 4
    quick: ClassVar[bool] = False

    @pytest.fixture(scope="class")
    @classmethod
    def worlds(cls) -> Iterator[WorldMaker]:
        """Worlds of the backend under test."""
        made = WorldMaker(cls.backend, cls.config, cls.ranks, quick=cls.quick)
        yield made
        fault = made.rest()
        assert not fault, fault

    def test_no_check_is_overridden(self) -> None:
        """No test of the suite is replaced or removed, unless it is expected to fail, strictly, and with a reason."""
        kind = type(self)
        for name in [name for name in dir(BackendConformance) if name.startswith("test_")]:
            own = getattr(kind, name)
            if own is getattr(BackendConformance, name):
                continue
            marks = [mark for mark in getattr(own, "pytestmark", []) if mark.name == "xfail"]
            assert any(mark.kwargs.get("strict") and mark.kwargs.get("reason") for mark in marks), (
                f"{kind.__name__}.{name} replaces a check of the suite: take it away, or mark it with "
                f'@pytest.mark.xfail(strict=True, reason="...") and let it call super().{name}(worlds)'
            )


def _test_of(check: Check) -> Callable[[BackendConformance, WorldMaker], None]:
    def test(self: BackendConformance, worlds: WorldMaker) -> None:  # noqa: ARG001 - a method
        __tracebackhide__ = True
        result = run_check(check, worlds)
        if result.status == "skipped":
            pytest.skip(result.text)
        if result.status == "failed":
            pytest.fail(f"{check.promise}\n{result.text}", pytrace=False)

    test.__doc__ = check.promise
    test.__name__ = f"test_{check.chapter}_{check.name}"
    test.__qualname__ = f"BackendConformance.{test.__name__}"
    return test


for _check in all_checks():
    setattr(BackendConformance, f"test_{_check.chapter}_{_check.name}", _test_of(_check))
