"""The output of a pod: each line once, and its report of a failure kept back, because the pods report the same failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final

from oneaccord.api import ConfigError, RendezvousError, Thread
from oneaccord_kubernetes.cluster import Cluster, Gone, Pod

__all__ = ["Follower"]

_RULE: Final = b"-" * 80 + b"\n"
_OURS: Final = b"oneaccord run: "
_SECONDARY: Final = (b" failed first on this host: ", b"oneaccord run: ended by ")
_AGAIN_S: Final = 1.0
_OVERLAP_S: Final = 60
"""How much is asked for again after a connection broke, as clocks differ; lines that came before are left out."""


class Follower:
    """Follows the output of a pod, in a thread of its own.

    Parameters
    ----------
    cluster, pod
        The pod.
    show
        Called with each line, in that thread.
    say
        Called in that thread with the words about an output that cannot be read.

    Attributes
    ----------
    pod
        The pod.
    report
        What the launcher in the pod has said of a failure.
    """

    def __init__(self, cluster: Cluster, pod: Pod, show: Callable[[bytes], None], say: Callable[[str], None]) -> None:
        self.pod = pod
        self.report: bytes = b""
        self._cluster, self._show, self._show_problem = cluster, show, say
        self._held: bytes = b""
        """A line that may begin the report."""
        self._last = ""
        """The time of the last line."""
        self._is_gone = False
        self._thread = Thread(target=self._run, name=f"oneaccord-{pod.name}", daemon=True)
        self._thread.start()

    @property
    def is_secondary(self) -> bool:
        """Whether the ranks of the pod only learned that others had failed."""
        return any(words in self.report for words in _SECONDARY)

    def ended(self) -> None:
        """Say that the pod has ended, or is not there any more: what it has written is all there will be."""
        self._is_gone = True

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the output."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            before, was_over = self._last, self._is_gone  # what the pod wrote before its end was seen is in what is read now
            try:
                for line in _lines(self._cluster.output(self.pod.name, self._since())):
                    self._take(line, before)
            except Gone:
                break
            except ConfigError as error:
                self._show_problem(f"the output of the pod {self.pod.name} cannot be read: {error}")
                break
            except RendezvousError:  # as while a node is busy; the pod's end ends it
                pass
            if was_over:
                break
            time.sleep(_AGAIN_S)
        if self._held:
            self._show(self._held)

    def _since(self) -> int | None:
        if not self._last:
            return None
        then = datetime.fromisoformat(self._last[:19] + "+00:00")
        return max(1, int(time.time() - then.timestamp()) + _OVERLAP_S)

    def _take(self, line: bytes, before: str) -> None:
        """Take a line with its time in front, unless it came before."""
        stamp, _, text = line.partition(b" ")
        at = _sortable(stamp)
        if at <= before:
            return
        self._last = max(self._last, at)
        if self.report:
            self.report += text
        elif self._held:
            if text.startswith(_OURS):
                self.report = self._held + text
            else:
                self._show(self._held + text)
            self._held = b""
        elif text == _RULE:
            self._held = text
        else:
            self._show(text)


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield whole lines. If the connection breaks, its last line comes again with the next one."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest + b"\n"


def _sortable(stamp: bytes) -> str:
    """Return a time of Kubernetes with nine digits behind its seconds, so that times sort as text."""
    text = stamp.decode("ascii", "replace").rstrip("Z")
    whole, _, fraction = text.partition(".")
    return f"{whole}.{fraction:<09}"
