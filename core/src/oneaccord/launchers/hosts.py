"""The lists of hosts that schedulers write into variables."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oneaccord.errors import ConfigError

__all__ = ["expand_hostlist", "hosts_of_lsf", "tasks_of_node"]

_NAME = re.compile(r"(?:[^\[\],]|\[[^\[\]]+\])+")
_BRACKETS = re.compile(r"\[([^\]]+)\]")
_RANGE = re.compile(r"(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?\Z", re.ASCII)
_REPEATED = re.compile(r"(?P<tasks>\d{1,18})(?:\(x(?P<times>\d{1,18})\))?\Z", re.ASCII)


def expand_hostlist(text: str) -> Iterator[str]:
    """Yield the hosts of a Slurm hostlist, such as ``node[001-004,007],gpu3``, in their order.

    A number keeps the width of the first of its range, and a name may hold several brackets: ``rack[1-2]node[01-16]``.

    Raises
    ------
    ConfigError
        The text is no hostlist.
    """
    names = _NAME.findall(text)
    if not names or ",".join(names) != text:
        raise _not_a_hostlist(text)
    for name in names:
        yield from _combined(_BRACKETS.split(name), text)


def _combined(pieces: list[str], text: str, at: int = 0) -> Iterator[str]:
    """Yield each combination of ``pieces[at:]``, which are plain text and ranges in turn; lazily, for a range may be long."""
    if at == len(pieces):
        yield ""
        return
    for start in _numbers(pieces[at], text) if at % 2 else (pieces[at],):
        for rest in _combined(pieces, text, at + 1):
            yield start + rest


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        found = _RANGE.match(part.strip())
        if found is None:
            raise _not_a_hostlist(text)
        first, last = found["first"], found["last"] or found["first"]
        if int(last) < int(first):
            raise _not_a_hostlist(text)
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _not_a_hostlist(text: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is not a list of hosts such as node[001-004,007],gpu3; set ONEACCORD_RENDEZVOUS=host:port to name the host of "
        "rank 0 yourself",
        value=text,
    )


def tasks_of_node(text: str, node: int) -> int | None:
    """Return how many tasks node number ``node`` runs by a Slurm list such as ``4(x2),3``; None when it does not say."""
    for part in text.split(","):
        found = _REPEATED.match(part.strip())
        if found is None:
            return None
        node -= int(found["times"] or 1)
        if node < 0:
            return int(found["tasks"])
    return None


def hosts_of_lsf(text: str) -> list[str]:
    """Return the compute hosts of ``LSB_MCPU_HOSTS``, such as ``batch1 1 node01 42 node02 42``.

    On machines with ``jsrun`` the first host is the one that runs the batch script, with a single slot, and no rank runs there.
    """
    words = text.split()
    slots = list(zip(words[::2], words[1::2], strict=False))
    if len(slots) > 1 and slots[0][1] == "1" and slots[1][1] != "1":
        del slots[0]
    return [host for host, _ in slots]
