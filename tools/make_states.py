"""Write the states of the control plane, of the store and of a rank, into docs/explanation/control-plane-states.md.

Usage: python tools/make_states.py [--check]

``--check`` writes nothing, and fails if the page is not current.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from enum import Enum, Flag
from pathlib import Path
from typing import NamedTuple

from oneaccord.control import client_states, store_states
from oneaccord.control.store_states import State

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "control-plane-states.md"
BEGIN, END = "<!-- made by tools/make_states.py: {} -->", "<!-- end -->"
GROUPS: dict[Flag, str] = {
    ~State(0): "any",
    State.DECIDED | State.FAILED: "decided, failed",
    ~(State.DECIDED | State.FAILED): "all before decided",
}


class Line(NamedTuple):
    """A row of one of the two tables."""

    on: type | Enum
    during: Flag
    do: tuple[Enum, ...]
    then: Flag | None


def lines() -> dict[str, list[Line]]:
    """Return the rows of the tables: of a rank's those that change something, but for its end."""
    store = [Line(row.on, row.during, row.do, row.then) for row in store_states.ROWS]
    moving = (row for row in client_states.ROWS if row.then or row.do is not client_states.Action.NONE)
    client = [Line(row.on, row.during, (row.do,), row.then) for row in moving if row.on is not client_states.Event.CLOSE]
    return {"store": store, "rank": client}


def name_of(state: Flag) -> str:
    """Return one state in the words of the page."""
    return (state.name or "").lower()


def states_of(line: Line) -> str:
    """Return the states of a row."""
    return GROUPS.get(line.during) or ", ".join(name_of(state) for state in line.during)


def event_of(line: Line) -> str:
    """Return what happens in a row: a message of a rank by its name, anything else in words."""
    return line.on.value if isinstance(line.on, Enum) else f"`{line.on.__name__}`"


def diagram(rows: list[Line]) -> Iterator[str]:
    """Yield the lines of a diagram of the states; the first row is of the state in which all begins."""
    yield from ("```mermaid", "stateDiagram-v2", f"    [*] --> {name_of(next(iter(type(rows[0].during))))}")
    for row in rows:
        for state in row.during:
            if row.then and row.then is not state:
                yield f"    {name_of(state)} --> {name_of(row.then)}: {event_of(row)}"
    yield "```"


def table(rows: list[Line], whose: str) -> Iterator[str]:
    """Yield the lines of a table of the rows."""
    yield from (f"| when | in states | the {whose} must |", "|---|---|---|")
    for row in rows:
        yield f"| {event_of(row)} | {states_of(row)} | {'; '.join(action.value for action in row.do)} |"


def page(text: str) -> str:
    """Return a page with its sections written anew."""
    for whose, rows in lines().items():
        begin = BEGIN.format(whose)
        before, _, rest = text.partition(begin)
        section = "\n".join(["", *diagram(rows), "", *table(rows, whose), ""])
        text = f"{before}{begin}\n{section}\n{END}{rest.partition(END)[2]}"
    return text


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the page is not current")
    text = PAGE.read_text(encoding="utf-8")
    if parser.parse_args().check:
        if page(text) != text:
            print("docs/explanation/control-plane-states.md is not current: run `python tools/make_states.py`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
