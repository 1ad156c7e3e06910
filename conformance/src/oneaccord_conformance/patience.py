"""How long checks wait. A machine that has much to do makes everything late, and must not make a good backend fail.

So an event that must happen has half a minute. If a check is about promptness, its group has a timeout of a minute, and the check only examines whether a call ended well
before that: the kind of the error says the rest. A later event in the same order proves that another one did not happen. A deadline that is meant to pass may be
short; then nothing may depend on how late it passes.
"""

from __future__ import annotations

from typing import Final

__all__ = ["AT_ONCE_S", "LONG_S", "LOST_S", "PROGRAM_S", "PROMPT_S", "SHORT_S", "TIMEOUT_S"]

TIMEOUT_S: Final = 30.0
"""The timeout of events that must happen: of calls, of waits on a bare transport, of ends in the background."""
PROGRAM_S: Final = 120.0
"""How long the program of a check may last: a call that hangs ends before, by its own timeout, if the backend looks at deadlines."""
LONG_S: Final = 60.0
"""The timeout of a group whose calls must end long before it."""
PROMPT_S: Final = 20.0
"""A call that ended within this time did not wait for `LONG_S`, nor forever."""
AT_ONCE_S: Final = 20.0
"""A call that ended within this time did not block, as calls that never block must not."""
LOST_S: Final = 0.5
"""How long a transport may take to see that a peer is gone; one that cannot see that need not."""
SHORT_S: Final = 0.1
"""A deadline that is meant to pass."""
