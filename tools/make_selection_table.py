"""Write the table by which manyhands chooses algorithms, from what the model predicts. It takes some minutes.

Usage: python tools/make_selection_table.py
"""

from __future__ import annotations

from pathlib import Path

from manyhands.select import write_table
from manyhands.tuning.model import TOLERANCE, model_rules

TABLE = Path(__file__).resolve().parent.parent / "core" / "src" / "manyhands" / "select" / "default.toml"

HEADING = (
    "The algorithm of each call: rows are read from the top, and the first that fits is taken.",
    "",
    "Written by tools/make_selection_table.py from simulated times: on one host, and on hosts of one and of eight ranks that are",
    f"joined by 10 Gbit/s Ethernet. At the simulated sizes and worlds no choice takes over {TOLERANCE:.0%} longer than the best.",
)

if __name__ == "__main__":
    rules = model_rules()
    TABLE.write_text(write_table(rules, HEADING), encoding="utf-8")
    print(f"{TABLE}: {len(rules)} rows")
