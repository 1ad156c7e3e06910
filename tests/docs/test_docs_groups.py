"""docs/guides: the pages whose pieces of code use the group of the page are run, piece after piece, on four ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import oneaccord as oa
from oneaccord_simulated import run

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"


@pytest.mark.parametrize("page", ["groups", "reductions", "shared-memory"])
def test_every_piece_of_a_page_runs_as_it_stands(page: str) -> None:
    text = (GUIDES / f"{page}.md").read_text(encoding="utf-8")
    pieces = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)

    def program(group: oa.Group) -> None:
        names = {"group": group, "oa": oa, "np": np}
        for piece in pieces:
            exec(compile(piece, f"{page}.md", "exec"), names)
            group.barrier()

    assert len(pieces) >= 2
    run(program, 4)
