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
_BREAKS: Final = 3
"""How often the connection may break after the pod's end without anything new."""
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
        self._rest: bytes = b""
        """The end of what was read, without the end of its line."""
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
        breaks = 0
        while True:
            before, was_over, is_broken = self._last, self._is_gone, False
            try:
                for line in self._lines(self._cluster.output(self.pod.name, self._since())):
                    self._take(line, before)
            except Gone:
                break
            except ConfigError as error:
                self._show_problem(f"the output of the pod {self.pod.name} cannot be read: {error}")
                break
            except RendezvousError:  # as while a node is busy; the pod's end ends it
                is_broken = True
            # Not each broken connection is an error: what brings nothing new after the pod's end has reached the end of its output.
            if was_over and self._last == before:
                breaks += is_broken
                if not is_broken or breaks == _BREAKS:
                    break
            if not was_over or is_broken:
                time.sleep(_AGAIN_S)
        if self._rest:
            self._take(self._rest + b"\n", self._last)
        if self._held:
            self._show(self._held)

    def _since(self) -> int | None:
        if not self._last:
            return None
        then = datetime.fromisoformat(self._last[:19] + "+00:00")
        return max(1, int(time.time() - then.timestamp()) + _OVERLAP_S)

    def _lines(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield whole lines. If the connection breaks, its last line comes again with the next one."""
        self._rest = b""
        for piece in pieces:
            *whole, self._rest = (self._rest + piece).split(b"\n")
            yield from (line + b"\n" for line in whole)

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


def _sortable(stamp: bytes) -> str:
    """Return a time of Kubernetes with nine digits behind its seconds, so that times sort as text."""
    text = stamp.decode("ascii", "replace").rstrip("Z")
    whole, _, fraction = text.partition(".")
    return f"{whole}.{fraction:<09}"
