"""The pages on training: the first program runs as it stands there, and the ways through a mesh are those that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from support import preloaded
from support.worlds import must, thread_world

import oneaccord as oa
import oneaccord_parallel as mp

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
PAGES = [GUIDES / f"{name}.md" for name in ("training", "large-models", "checkpoint-details")]
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_the_first_program_does_what_the_page_shows(tmp_path):
    program = re.search(r"^```python\n(# line\.py\n.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    shown = re.search(r"^```console\n\$ oneaccord ([^\n]+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert program is not None
    assert shown is not None
    (tmp_path / "line.py").write_text(program[1], encoding="utf-8")
    done = preloaded.run(["-m", "oneaccord", *shown[1].split()], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown[2], "")


def test_the_way_from_one_placement_to_another_is_the_one_of_the_page():
    def program(group):
        with oa.DeviceMesh(group, (2, 2), ("dp", "tp")) as mesh:
            d = mp.distribute(np.arange(24.0).reshape(4, 6), mesh, [mp.Shard(0), mp.Shard(0)])
            return "".join(f"{step}\n" for step in d.explain([mp.Replicate(), mp.Shard(0)]))

    shown = re.search(r"^```\n(tp: .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert shown is not None
    assert must(thread_world(program, 4, "simulated")) == [shown[1]] * 4


def test_every_name_of_the_pages_is_there():
    names = set(re.findall(r"\bmp\.(\w+)", PAGE))
    assert len(names) > 30
    assert sorted(names - set(dir(mp))) == []
