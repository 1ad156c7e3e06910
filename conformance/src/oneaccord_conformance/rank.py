"""A rank that is a process of its own: ``oneaccord run ... -m oneaccord_conformance.rank SOCKET TIMEOUT CLOCK``.

It takes programs from the socket, one line of JSON each, and answers with their results; ``{"rest": true}`` says that all ranks have ended the last one.
CLOCK is ``virtual`` if ranks run on a clock of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import IO, Any

import oneaccord as oa
from oneaccord_conformance.ranks import HERE, Here, outcome_of

__all__ = ["main"]

_REST_S = 1.0
"""How often a simulated world shows that it lives, while no rank runs a program."""


def main() -> None:
    """Be a rank, until the socket ends."""
    address, timeout_s, clock = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(address)
        with own.makefile("w", encoding="utf-8") as answers:
            _live(_orders(own, is_virtual=clock == "virtual"), _Answers(answers), float(timeout_s))


def _orders(own: socket.socket, *, is_virtual: bool) -> Iterator[dict[str, Any]]:
    """Yield the programs that come, until the other side ends."""
    partial, others_run = b"", True
    while True:
        # A rank that only waits for an event outside of a simulated world keeps the running ranks waiting for seconds, and one in which nothing happens for long
        # counts as deadlocked.
        while is_virtual and not select.select([own], [], [], 0.0002 if others_run else _REST_S)[0]:
            oa.sleep(0.001)
        data = own.recv(1 << 16)
        if not data:
            return
        *lines, partial = (partial + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            others_run = "rest" not in order
            if others_run:
                yield order


class _Answers:
    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()  # words may come from threads of a program

    def write(self, what: str, fact: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"what": what, "fact": fact}) + "\n")
            self._file.flush()


def _live(orders: Iterator[dict[str, Any]], answers: _Answers, timeout_s: float) -> None:
    here = Here(None, None, timeout_s, lambda word: answers.write("word", word))
    HERE.set(here)

    def body() -> None:
        with here.join() as group:
            answers.write("here", [group.rank, os.getpid()])
            for order in orders:
                module, _, name = order["program"].partition(":")
                program = getattr(importlib.import_module(module), name)
                outcome, error = outcome_of(lambda: program(group, **order["facts"]))  # noqa: B023 - called at once
                answers.write("outcome", asdict(outcome))
                if error is not None:
                    raise error

    outcome, error = outcome_of(body)
    if error is not None:
        answers.write("failed", asdict(outcome))
        sys.exit(3)


if __name__ == "__main__":
    main()
