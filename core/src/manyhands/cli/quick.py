"""Understanding the words of ``manyhands run`` without typer, whose import takes as long as all else that the launcher needs.

Only what needs no explanation is understood here: where a word is unknown, missing or wrong, typer shall say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manyhands.common.processors import processors
from manyhands.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from manyhands.launch.starting import RunOptions

__all__ = ["advise", "understand"]

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
_TEXTS = {
    "--backend": "backend",
    "--config": "config",
    "--rendezvous": "rendezvous",
    "--record": "record",
    "--run-id": "run_id",
}
_OF_OTHERS = {
    **dict.fromkeys(
        ("-np", "--np", "-p", "--nprocs", "--nproc", "--nproc-per-node", "--num-processes", "--ntasks"), "-n NUMBER"
    ),
    **dict.fromkeys(("--rdzv-endpoint", "--master-addr", "--master-port"), "--rendezvous HOST:PORT"),
    "--rdzv-id": "--run-id WORD",
    **dict.fromkeys(
        ("-H", "--host", "--hosts", "--hostfile", "-f"), "--nnodes and --node-rank, with a manyhands run on each host"
    ),
    **dict.fromkeys(("--standalone", "--oversubscribe", "--rdzv-backend", "--allow-run-as-root"), ""),
}
"""What torchrun's and mpirun's options are called here; nothing where they are not needed."""


def advise(words: Sequence[str]) -> None:
    """Refuse options of other launchers in words that `understand` left to typer, and say what they are called here.

    Raises
    ------
    UsageError
        One of the words is such an option, or a number of ranks is none.
    """
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "--":
        word, has_value, value = words[position].partition("=")
        following = words[position + 1] if position + 1 < len(words) else ""
        if word in _FLAGS:
            position += 1
        elif word in _NUMBERS or word in _SECONDS or word in _TEXTS:
            _advise_number(word, value if has_value else following)
            position += 1 if has_value else 2
        else:
            _advise(word)
            return  # whether it takes a value, and what follows, is not known


def _advise_number(word: str, value: str) -> None:
    """Raise if a number of ranks is none, such as ``auto``."""
    if word in {"-n", "--ranks"} and value.isidentifier():
        count = processors()
        raise UsageError(
            f"{word} {value}: give the number of ranks; this host has {count} processors for them, as in: manyhands run -n {count}"
        )


def _advise(word: str) -> None:
    """Raise if a word is an option of another launcher."""
    name = word.replace("_", "-") if word.startswith("--") else word
    if name in _OF_OTHERS:
        instead = _OF_OTHERS[name]
        advice = f"write {instead}" if instead else "leave it out"
        example = ", as in: manyhands run -n 4 script.py" if instead == "-n NUMBER" else ""
        raise UsageError(f"manyhands run has no option {word}; {advice}{example}")
    if name != word and name in {*_FLAGS, *_NUMBERS, *_SECONDS, *_TEXTS}:
        raise UsageError(f"manyhands run has no option {word}; write {name}")


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
