"""How long the control plane waits, and why so long. All values are seconds; deadlines of users' calls are elsewhere.

The time that a rank's death takes to be known is most of what a user waits after a failure, so each value is as short as its reason allows.
"""

from __future__ import annotations

from typing import Final

__all__: list[str] = []

# Waits of a rank.

STALL_S: Final = 0.4
"""How long a rank waits in an exchange before it says so. Shorter, and ranks that are only unevenly busy would ask the store all the time."""
REPORT_PER_RANK_S: Final = 0.004
"""For each rank of the job, how long a rank that still waits in a call is quiet before it says so again: the store hears of 250 waits a second at most, \
however many ranks wait. Each names all ranks, and costs the store more, the more they are."""
SILENCE_S: Final = 1.0
"""How long a rank that found a failure waits to hear of the common first cause before it says that the store does not answer."""
VERDICT_S: Final = 30.0
"""How long it waits at most while the store says other things, so that the store is alive."""
MISSING_S: Final = 2.0
"""How long a rank waits, once the job has failed, for the store to say which ranks are missing."""
LAST_WORDS_S: Final = 1.0
"""How long a rank tries to send what it says last, when its process may end at any moment."""
DYING_S: Final = 0.1
"""How long a process lasts at most once its connections have ended because it does: the kernel closes them one after the other."""
ORPHAN_S: Final = 3.0
"""How long the standby has to say what became of the store."""
LATECOMERS_S: Final = 1.0
"""How long the store of a job that has not formed stays, so that ranks on their way are told why."""
SUCCESSOR_S: Final = 2.0
"""How long a new job waits until its store has a standby, which usually takes milliseconds."""

# Waits of the store.

INQUEST_S: Final = 0.4
"""How long the others have to say what they do when one rank reports a failure; one that does not answer is named as silent."""
SUSPICION_S: Final = 0.5
"""How long a lost connection may have another cause than the rank's end, which would be the better one to name."""
AGREEMENT_S: Final = 0.25
"""How long the store waits for its standby before it tells the others the first cause."""
LATE_LOOK_S: Final = 0.2
"""How often to look whether ranks that are late have ended."""
READY_S: Final = 5.0
"""How long a rank that was ready to come may take to come."""
DRAIN_S: Final = 1.0
"""How long to wait for the others to go once the job has failed."""

# Waits of the standby, and of ranks that continue without a store.

STORE_SAYS_S: Final = 1.0
"""How long the store has to say what became of a rank whose connection to the standby has ended."""
SEEN_S: Final = 0.05
"""How long to wait until this rank itself has seen the store end: its connection to the store may be read a moment later."""
COMING_S: Final = 0.5
"""How long ranks and the standby wait for each other if the store ends before they are connected."""
GATHERING_S: Final = 5.0
"""How long to wait for ranks that look for each other, after both the store and its standby are lost."""
GATHERING_LOOK_S: Final = 0.01
"""How often to look whether all have come."""
FAR_S: Final = 1.0
"""How long to wait for newcomers that may be on other hosts, of which this host's launcher knows nothing."""
NEWCOMERS_LOOK_S: Final = 0.01
"""How often to look how many newcomers the launcher has started."""
