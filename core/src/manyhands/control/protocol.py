"""What ranks and the store say to each other on the control connections, as msgpack."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from manyhands.common.checks import UNREADABLE

__all__ = [
    "ANOTHER_CALL",
    "RUNS_ALREADY",
    "Agree",
    "Agreed",
    "Agreement",
    "Cards",
    "Decided",
    "Disbanded",
    "Exchange",
    "Farewell",
    "FromRank",
    "FromStore",
    "GiveUp",
    "Gone",
    "JobReformed",
    "Join",
    "Leave",
    "LeaveGroup",
    "Orphaned",
    "Prepare",
    "Progress",
    "Question",
    "Report",
    "Shrink",
    "Shrunk",
    "Stalled",
    "Standby",
    "Successor",
    "Testimony",
    "Verdict",
    "Wait",
    "Welcome",
    "Whereabouts",
    "decode_from_rank",
    "decode_from_store",
    "encode",
    "ranks_in",
]

RUNS_ALREADY = "running"
"""The kind of the verdict on a rank that has come too late for the beginning."""
ANOTHER_CALL = "another call"
"""What stands in the text of a mismatch where its reporter cannot tell what its peer did; the store puts the peer's own words there."""
MAX_CARD_BYTES = 65536
MAX_FROM_RANK_BYTES = MAX_CARD_BYTES + 4096


class Whereabouts(msgspec.Struct, frozen=True):
    """Where a rank is found if the store and its successor have both ended: an address, at which it listens only then, with port 0 if it has none.

    ``pid`` is the number of its process. Who has the same ``processes`` can look it up, and no network is between the two; empty where that is not known.
    """

    host: str
    port: int
    pid: int
    processes: str


class Join(msgspec.Struct, frozen=True, tag=True):
    """A rank comes.

    ``verdict`` is the first cause, where it has been told one and looks for the others since; ``place`` where it is found by them. The store writes
    into ``certificate`` the names in that of the connection.
    """

    rank: int
    world_size: int
    backend: str
    choices: str
    version: str
    byteorder: str
    host: str
    pid: int
    verdict: Verdict | None = None
    place: Whereabouts | None = None
    certificate: str = ""


class Exchange(msgspec.Struct, frozen=True, tag=True):
    """A rank gives its card under a name, and waits for those of the other ``members``."""

    name: str
    card: bytes
    members: list[int]


class Progress(msgspec.Struct, frozen=True):
    """How far a rank has come: per channel the collectives begun, and the messages begun to and from each peer."""

    calls: dict[int, int]
    sends: dict[int, dict[int, int]]
    receives: dict[int, dict[int, int]]


class Wait(msgspec.Struct, frozen=True):
    """A call that a rank has been in for a while.

    ``digest`` is that of a collective's `CallSignature`, and empty for other calls. ``messages`` are those that a call between two
    ranks waits for, as (peer, is a send, number). ``members`` are the ranks of the group. ``meeting`` is the name of the exchange
    that the call is, and empty in all other calls.
    """

    channel: int
    sequence: int
    operation: str
    digest: bytes
    awaiting: list[int]
    messages: list[tuple[int, bool, int]]
    members: list[int]
    meeting: str = ""

    @property
    def is_collective(self) -> bool:
        """Whether all members of the group take part in the call, by messages of their own."""
        return bool(self.digest)


class Stalled(msgspec.Struct, frozen=True, tag=True):
    """A rank has waited in a call for a while.

    ``wait`` is that call, and ``waits`` are all calls that the rank is in and has been for a while. ``quiet`` tells that it is in no
    other call, and that no thread of the rank can make another one before one of these ends.
    """

    wait: Wait
    waits: list[Wait]
    progress: Progress
    quiet: bool


class Report(msgspec.Struct, frozen=True, tag=True):
    """A rank found a failure; ``kind`` is a key of `verdicts.KINDS`, and ``members`` are those who can say more, all if empty."""

    kind: str
    text: str
    peer: int | None = None
    operation: str | None = None
    channel: int | None = None
    sequence: int | None = None
    members: list[int] = []


class Testimony(msgspec.Struct, frozen=True, tag=True):
    """A rank says what it knows about a call: its own call at that place, or the last one it made.

    ``calls`` is how many it has made there, ``waits`` what it has waited for a while, and ``progress`` how far it has come.
    """

    inquest: int
    entered: bool
    text: str
    calls: int = 0
    waits: list[Wait] = []
    progress: Progress = Progress({}, {}, {})


class Leave(msgspec.Struct, frozen=True, tag=True):
    """A rank has finished."""

    progress: Progress


class LeaveGroup(msgspec.Struct, frozen=True, tag=True):
    """A rank has finished with one of its groups; ``progress`` is that on the group's channels."""

    group: int
    members: list[int]
    progress: Progress


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All ranks have come.

    ``key`` proves membership on data connections, ``hosts`` tells by numbers who shares a host, and ``places`` where each rank is found if the store
    and its successor both end. ``certificates`` are the names in those of all ranks, by which later connections are judged; empty if there are none.
    """

    key: bytes
    hosts: list[int]
    places: list[Whereabouts | None]
    certificates: list[str] = []


class Cards(msgspec.Struct, frozen=True, tag=True):
    """The cards of an exchange, in the order of its members.

    From ``number`` on there are as many numbers as members that no other exchange gets.
    """

    name: str
    cards: list[bytes]
    number: int


class Checkpoint(msgspec.Struct, frozen=True, tag=True):
    """What a rank has called on devices so far, in short: all that share a place must have the same digest after as many calls."""

    place: str
    count: int
    digest: bytes
    members: list[int]


class Disbanded(msgspec.Struct, frozen=True, tag=True):
    """All members have finished with a group."""

    group: int


class Shrink(msgspec.Struct, frozen=True, tag=True):
    """A rank of a job that has failed asks to go on with those that are left; if it is the first of them, it listens for them there.

    It waits for ``patience_s`` at most for newcomers, and ``has_door`` tells whether it could let them in. ``attempt`` is how often it has asked.
    ``certificate`` are the names in its certificate, if names are compared.
    """

    host: str
    port: int
    patience_s: float = 0.0
    has_door: bool = False
    attempt: int = 0
    certificate: str | None = None


class Agree(msgspec.Struct, frozen=True, tag=True):
    """A rank gives its flag to an agreement of ``members``, and waits for those of the others that are left.

    To a store that has taken over it gives what it ``is_told``, if the agreement has ended for it. ``attempt`` tells how often it has given up before.
    """

    name: str
    flag: int
    members: list[int]
    attempt: int = 0
    is_told: bool = False


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """A rank has waited so long for the others to come to an agreement or, where that has no name, to ask to go on; in which ``attempt``."""

    timeout_s: float
    agreement: str = ""
    attempt: int = 0


class JobReformed(msgspec.Struct, frozen=True, tag=True):
    """These ranks are in the next job: who is not must not go on beside them. A rank says so of itself, and passes on what it was told."""

    ranks: list[int]


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """The first cause of the job's failure, alike for all ranks."""

    kind: str
    text: str
    peer: int | None = None
    operation: str | None = None
    sequence: int | None = None


class Standby(msgspec.Struct, frozen=True, tag=True):
    """A rank is ready to go on where the store ends, and listens for the others there."""

    host: str
    port: int


class Orphaned(msgspec.Struct, frozen=True, tag=True):
    """A rank tells the store's successor that its connection to the store has ended."""

    reason: str


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """The store's successor knows of the first cause, or has found another one before: that one then holds."""

    verdict: Verdict


class Question(msgspec.Struct, frozen=True, tag=True):
    """The store asks what a rank knows about the call ``sequence`` of ``channel``."""

    inquest: int
    channel: int
    sequence: int


class Decided(msgspec.Struct, frozen=True, tag=True):
    """The store tells its successor the first cause before it tells anybody else."""

    verdict: Verdict


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """A rank is to get ready to go on where the store, with rank ``store``, ends; ``gone`` are those that have ended or said goodbye."""

    store: int
    gone: list[int] = []


class Successor(msgspec.Struct, frozen=True, tag=True):
    """Who goes on where the store ends, and where it listens for the others."""

    rank: int
    host: str
    port: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended: that of the first failure, or one that ends later."""

    rank: int
    reason: str


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """All ranks have left."""


class Shrunk(msgspec.Struct, frozen=True, tag=True):
    """The ranks that are left, in order, and where the first of them waits for the others; or why they cannot go on.

    Behind them stand newcomers, with numbers behind those of the job that has failed; ``you`` is that of the one that is told. ``attempt`` is that of
    the question, and 0 where none was waited for. ``certificate`` are the names in that of the first one.
    """

    ranks: list[int]
    host: str
    port: int
    problem: Verdict | None = None
    you: int = -1
    attempt: int = 0
    certificate: str | None = None


class Agreement(msgspec.Struct, frozen=True, tag=True):
    """What the members of an agreement have agreed on, or why they have not in this ``attempt`` of the one that is told."""

    name: str
    flag: int
    problem: Verdict | None = None
    attempt: int = 0


FromRank = (
    Join
    | Exchange
    | Stalled
    | Report
    | Testimony
    | Leave
    | LeaveGroup
    | Checkpoint
    | Agree
    | Shrink
    | GiveUp
    | JobReformed
    | Standby
    | Orphaned
    | Agreed
)
FromStore = (
    Welcome
    | Cards
    | Disbanded
    | Question
    | Verdict
    | Farewell
    | Agreement
    | Shrunk
    | JobReformed
    | Decided
    | Prepare
    | Successor
    | Gone
)

_encoder = msgspec.msgpack.Encoder()
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_from_store: msgspec.msgpack.Decoder[FromStore] = msgspec.msgpack.Decoder(FromStore)


def encode(message: FromRank | FromStore) -> bytes:
    """Return the frame of a message."""
    return _encoder.encode(message)


def decode_from_rank(frame: bytes | None) -> FromRank | None:
    """Return the message in a frame, None when it is none."""
    if frame is None:
        return None
    try:
        return _from_rank.decode(frame)
    except UNREADABLE:
        return None


def decode_from_store(frame: bytes | None) -> FromStore | None:
    """Return the message in a frame, None when it is none."""
    if frame is None:
        return None
    try:
        return _from_store.decode(frame)
    except UNREADABLE:
        return None


def ranks_in(message: FromRank | FromStore) -> Iterator[int]:
    """Yield every number of a message that must be that of a rank; those who go on or went on, and who has ended meanwhile, may be newcomers."""
    match message:
        case Exchange() | Checkpoint() | Agree():
            yield from message.members
        case Stalled():
            for wait in (message.wait, *message.waits):
                yield from _ranks_of(wait)
            yield from _ranks_of(message.progress)
        case Testimony():
            for wait in message.waits:
                yield from _ranks_of(wait)
            yield from _ranks_of(message.progress)
        case Report():
            yield from message.members
            yield 0 if message.peer is None else message.peer
        case (
            Verdict(peer=int(peer))
            | Shrunk(problem=Verdict(peer=int(peer)))
            | Agreement(problem=Verdict(peer=int(peer)))
            | Decided(verdict=Verdict(peer=int(peer)))
            | Agreed(verdict=Verdict(peer=int(peer)))
            | Successor(rank=peer)
        ):
            yield peer
        case Welcome(hosts=ranks):
            yield from ranks
        case Prepare(gone=ranks):
            yield message.store
            yield from ranks
        case Leave():
            yield from _ranks_of(message.progress)
        case LeaveGroup():
            yield from message.members
            yield from _ranks_of(message.progress)
        case _:
            pass


def _ranks_of(part: Wait | Progress) -> Iterator[int]:
    if isinstance(part, Wait):
        yield from part.members
        yield from part.awaiting
        yield from (peer for peer, _, _ in part.messages)
    else:
        for counts in (*part.sends.values(), *part.receives.values()):
            yield from counts
