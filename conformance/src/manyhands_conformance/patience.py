"""How long checks wait. A machine that has much to do makes everything late, and must not make a good backend fail.

So what must happen has half a minute. Where a check is about promptness, its group has a timeout of a minute, and the check asks only whether a call ended well
before that: the kind of the error says the rest. What must not happen is shown by what comes later in the same order. A deadline that is meant to pass may be
short; then nothing may depend on how late it passes.
"""

from __future__ import annotations

from typing import Final

__all__ = ["AT_ONCE_S", "LONG_S", "LOST_S", "PROGRAM_S", "PROMPT_S", "SHORT_S", "TIMEOUT_S"]

TIMEOUT_S: Final = 30.0
"""The timeout of what must happen: of calls, of waits on a bare transport, of what ends in the background."""
PROGRAM_S: Final = 120.0
"""How long the program of a check may last: a call that hangs ends before, by its own timeout, if the backend looks at deadlines."""
LONG_S: Final = 60.0
"""The timeout of a group, where a call must end long before it."""
PROMPT_S: Final = 20.0
"""What ended within this time did not wait for `LONG_S`, nor for ever."""
AT_ONCE_S: Final = 20.0
"""What ended within this time did not block, as calls do not that never block."""
LOST_S: Final = 0.5
"""How long a transport may take to see that a peer is gone; one that cannot see that need not."""
SHORT_S: Final = 0.1
"""A deadline that is meant to pass."""
