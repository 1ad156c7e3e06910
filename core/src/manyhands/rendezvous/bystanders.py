"""Which threads of this process will never come to the rescue of a rank that waits."""

from __future__ import annotations

import threading
import weakref

__all__ = ["nobody_else", "stands_by"]

_bystanders: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def stands_by(thread: threading.Thread) -> None:
    """Take note that a thread is another rank's own, or only waits for threads that are."""
    _bystanders.add(thread)


def nobody_else() -> bool:
    """Tell whether no thread but the calling one could use its group: every other is manyhands' own, or stands by."""
    me = threading.current_thread()
    return all(thread is me or thread in _bystanders or thread.name.startswith("manyhands") for thread in threading.enumerate())
