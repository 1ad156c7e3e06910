"""Write the table by which oneaccord chooses algorithms, from what the model predicts. It takes the better part of an hour.

Usage: python tools/make_selection_table.py
"""

from __future__ import annotations

import gc
from pathlib import Path

from oneaccord.config.select import write_table
from oneaccord_lab.tuning.model import SLACK, TOLERANCE, model_rules

TABLE = Path(__file__).resolve().parent.parent / "core" / "src" / "oneaccord" / "config" / "select" / "default.toml"

HEADING = (
    "The algorithm of each call: rows are read from the top, and the first that fits is taken.",
    "",
    "Written by tools/make_selection_table.py from simulated times: on one host, and on hosts of one and of eight ranks that are",
    "joined by 10 Gbit/s Ethernet; beyond 64 ranks also by the networks of the presets fat-tree and torus. At the simulated sizes and",
    f"worlds no choice takes over {TOLERANCE:.0%} longer than the best. In large worlds, where one row is for all these networks and others",
    f"between them, that is {TOLERANCE * SLACK:.0%}.",
)

if __name__ == "__main__":
    gc.disable()  # Millions of numbers in large lists make no circles, and to look for some takes long.
    rules = model_rules()
    TABLE.write_text(write_table(rules, HEADING), encoding="utf-8")
    print(f"{TABLE}: {len(rules)} rows")
