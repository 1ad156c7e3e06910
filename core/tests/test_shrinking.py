"""What becomes of a shrink() whose ranks do not meet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oneaccord.contract.deadline import Deadline
from oneaccord.control.protocol import Shrunk
from oneaccord.errors import DeadlineError, RendezvousError
from oneaccord.group import shrinking


def test_ranks_that_have_no_time_left_to_meet_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    recovery = SimpleNamespace(shrink=lambda *_, **__: Shrunk([0, 1], "", 0))
    control = SimpleNamespace(cut=False, gone={}, recovery=recovery)
    released: list[bool] = []
    old: Any = SimpleNamespace(
        rank=1, meeting=None, control=control, may_shrink_again=False, release=lambda: released.append(True)
    )
    deadline = Deadline(30.0)

    def meet(*_: object) -> None:
        deadline.at = 0.0
        raise RendezvousError("rank 1 could not reach rank 0")

    monkeypatch.setattr(shrinking._Shrinking, "meet", meet)
    with pytest.raises(DeadlineError, match=r"did not end within 30 s, while the ranks met: rank 1 could not reach rank 0"):
        shrinking.shrink(old, None, deadline)  # type: ignore[arg-type]
    assert old.may_shrink_again
    assert not released
