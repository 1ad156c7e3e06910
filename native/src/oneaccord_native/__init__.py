"""The compiled executor of oneaccord. Core finds it by itself if it is installed; a program need not import it."""

from pathlib import Path

from oneaccord_native._core import (
    Call,
    Caller,
    Counters,
    Exchange,
    Lane,
    Low,
    Post,
    Posted,
    Program,
    Recv,
    Ring,
    Send,
    Stream,
    Window,
    free_word,
    mailbox_slot_bytes,
    measure_add,
    measure_copy,
    measure_flags,
    measure_pings,
    measure_stream,
    take_word,
)

__all__ = [
    "Call",
    "Caller",
    "Counters",
    "Exchange",
    "Lane",
    "Low",
    "Post",
    "Posted",
    "Program",
    "Recv",
    "Ring",
    "Send",
    "Stream",
    "Window",
    "free_word",
    "get_include",
    "mailbox_slot_bytes",
    "measure_add",
    "measure_copy",
    "measure_flags",
    "measure_pings",
    "measure_stream",
    "take_word",
]


def get_include() -> str:
    """Return the folder of ``mailbox.h``, which a plugin includes whose mailboxes have a form in C."""
    return str(Path(__file__).parent)
