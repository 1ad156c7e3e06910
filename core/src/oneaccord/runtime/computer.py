"""The computer's own clock and threads, on which ranks run that are processes."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from oneaccord.common.threads import Thread, Timer
from oneaccord.contract.runtime import Condition, Place, Runtime
from oneaccord.runtime.idle import Sleeper, begin_to_help, end_of_help

__all__ = ["COMPUTER", "has_ended", "namespaces", "neighbourhood"]


class _Computer(Runtime):
    """The computer's own clock and threads.

    Background threads are shared by the whole process, begin when they are needed, and end when they had nothing to do for a while.
    """

    now = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def compute(self, seconds: float) -> None:
        pass

    def mark(self, label: str) -> None:
        pass

    def place(self, *, for_good: bool) -> Place:
        return Sleeper(for_good=for_good)

    def condition(self) -> Condition:
        return threading.Condition()

    def start(self, action: Callable[[], None]) -> None:
        try:
            worker, is_new = _idle.pop(), False
        except IndexError:
            worker, is_new = _Worker(), True
        begin_to_help(worker)
        if is_new:
            try:
                # The rules about waiting see by the name that this thread makes no calls of its own.
                Thread(target=worker.run, name="oneaccord-work", daemon=True).start()
            except RuntimeError:
                end_of_help(worker)
                raise
        worker.action = action
        worker.given.release()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        timer = Timer(delay_s, action)
        timer.name = "oneaccord-timer"
        timer.daemon = True
        timer.start()

    def glance(self) -> None:
        pass

    def enter(self, rank: int) -> None:
        pass

    def on_behalf(self, action: Callable[[], None]) -> Callable[[], None]:
        return action

    def carry(self, source: int, dest: int, action: Callable[[], None]) -> None:
        action()

    def identity(self, rank: int) -> tuple[str, int]:
        return socket.gethostname(), os.getpid()


COMPUTER: Runtime = _Computer()
"""The computer's own clock and threads."""


def namespaces(*kinds: str) -> str:
    """Return 16 digits that two processes share if they have the same namespaces of these kinds, such as "time" or "pid", on one host since its start.

    It is empty if the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        mine = {entry.name: entry for entry in Path("/proc/self/ns").iterdir()}
        # Older kernels have fewer kinds, and one namespace of each other kind.
        names = [boot, *(str(mine[kind].readlink()) for kind in kinds if kind in mine)]
        return hashlib.blake2b(" ".join(names).encode(), digest_size=8).hexdigest()
    except (OSError, ValueError):
        return ""


def neighbourhood() -> str:
    """Return a text that two processes share if each can look the other up (`has_ended`) without a network; empty if none can."""
    try:
        # Else /proc is of other namespaces, and shows processes of other numbers.
        is_mine = str(Path("/proc/self").readlink()) == str(os.getpid())
    except OSError:
        return ""
    return namespaces("pid", "net") if is_mine else ""


_EXITING = 4
"""The flag of a process that is about to end (PF_EXITING of Linux): a process with much memory has it for a while after its connections have ended."""


def has_ended(pid: int) -> bool:
    """Return whether a process of this `neighbourhood` has ended, or is about to. If that cannot be looked up, it counts as running."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        words = stat.rpartition(b")")[2].split()
        return words[0] in (b"Z", b"X") or bool(int(words[6]) & _EXITING)
    except (FileNotFoundError, ProcessLookupError):
        pass
    except (OSError, ValueError, IndexError):  # for example, no descriptors are left
        return False
    try:
        os.kill(pid, 0)  # /proc need not show all processes
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


_IDLE_S = 2.0
"""How long a background thread waits for more to do before it ends."""


class _Worker:
    """A background thread, or the wish for one."""

    def __init__(self) -> None:
        self.ident: int | None = None
        self.action: Callable[[], None] | None = None
        self.given = threading.Lock()
        """Held until an action is there."""
        self.given.acquire()

    def run(self) -> None:
        self.ident = threading.get_ident()
        while True:
            if not self.given.acquire(timeout=_IDLE_S):
                try:
                    _idle.remove(self)
                except ValueError:  # another thread has just taken it: its action is on the way
                    continue
                return
            action, self.action = self.action, None
            try:
                if action is not None:
                    action()
            finally:
                end_of_help(self)
            del action
            _idle.append(self)


_idle: list[_Worker] = []
"""The waits for an action. The thread that takes one out owns it: this is one step of the interpreter, so that no lock is needed."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # the child does not have its parent's threads
