"""Understanding the words of ``manyhands run`` without typer, whose import takes as long as all else that the launcher needs.

Only what needs no explanation is understood here: where a word is unknown, missing or wrong, typer shall say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from manyhands.launch.starting import RunOptions

__all__ = ["understand"]

_FLAGS = {
    "-m": "module",
    "--module": "module",
    "--no-prefix": "no_prefix",
    "--keep-going": "keep_going",
    "--no-fork": "no_fork",
    "-v": "verbose",
    "--verbose": "verbose",
}
_NUMBERS = {
    "-n": "ranks",
    "--ranks": "ranks",
    "--nnodes": "nnodes",
    "--node-rank": "node_rank",
    "--max-restarts": "max_restarts",
    "--min-ranks": "min_ranks",
    "--max-ranks": "max_ranks",
}
_SECONDS = {"--grace": "grace_s"}
_TEXTS = {"--backend": "backend", "--config": "config", "--rendezvous": "rendezvous", "--record": "record"}


def understand(words: Sequence[str]) -> RunOptions | None:
    """Return what the words after ``run`` mean; None where typer must look at them."""
    options: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-"):
            from manyhands.launch.starting import RunOptions

            return RunOptions(word, tuple(words[position:]), **options)
        if word in _FLAGS:
            options[_FLAGS[word]] = True
            continue
        if word.startswith("--"):
            word, has_value, value = word.partition("=")
        else:
            has_value = value = ""
        if not has_value:
            value = words[position] if position < len(words) else "-"
            position += 1
            if value.startswith("-"):
                return None
        if word in _NUMBERS and value.isascii() and value.isdigit():
            options[_NUMBERS[word]] = int(value)
        elif word in _SECONDS and value.isascii() and value.isdigit():
            options[_SECONDS[word]] = float(value)
        elif word in _TEXTS:
            options[_TEXTS[word]] = value
        else:
            return None
    return None
