"""Write the states of a job into docs/elastic.md, as the control plane has them in its table.

Usage: python tools/make_states.py [--check]

``--check`` writes nothing, and fails if the page is not current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from manyhands.control.store_states import ROWS, Event, Row, State

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "elastic.md"
BEGIN, END = "<!-- made by tools/make_states.py -->", "<!-- end -->"
GROUPS = {
    ~State(0): "any",
    State.DECIDED | State.FAILED: "decided, failed",
    ~(State.DECIDED | State.FAILED): "all before decided",
}


def name_of(state: State) -> str:
    """Return one state in the words of the page."""
    return (state.name or "").lower()


def states_of(row: Row) -> str:
    """Return the states of a row."""
    return GROUPS.get(row.during) or ", ".join(name_of(state) for state in row.during)


def event_of(row: Row) -> str:
    """Return what happens in a row: a message of a rank by its name, anything else in words."""
    return row.on.value if isinstance(row.on, Event) else f"`{row.on.__name__}`"


def diagram() -> list[str]:
    """Return the lines of a diagram of the states."""
    arrows = [
        f"    {name_of(state)} --> {name_of(row.then)}: {event_of(row)}" for row in ROWS if row.then for state in row.during
    ]
    return ["```mermaid", "stateDiagram-v2", f"    [*] --> {name_of(State.MEETING)}", *arrows, "```"]


def table() -> list[str]:
    """Return the lines of a table of the rows."""
    rows = [f"| {event_of(row)} | {states_of(row)} | {'; '.join(action.value for action in row.do)} |" for row in ROWS]
    return ["| when | in states | the store must |", "|---|---|---|", *rows]


def section() -> str:
    """Return what stands between the marks."""
    return "\n".join(["", *diagram(), "", *table(), ""])


def page(text: str) -> str:
    """Return a page with its section written anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{section()}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the page is not current")
    text = PAGE.read_text(encoding="utf-8")
    if parser.parse_args().check:
        if page(text) != text:
            print("docs/elastic.md is not current: run `python tools/make_states.py`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
