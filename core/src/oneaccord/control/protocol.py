"""The messages between ranks and the store on the control connections, as msgpack."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from oneaccord.common.checks import UNREADABLE

__all__ = [
    "ANOTHER_CALL",
    "ANOTHER_JOB",
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
"""The kind of the verdict on a rank that comes to begin a job that runs already."""
ANOTHER_JOB = "another job"
"""The kind of the verdict on a rank that comes to the address of another job."""
ANOTHER_CALL = "another call"
"""The gap in the text of a mismatch whose reporter does not know what its peer did. The store fills in the peer's own words."""
MAX_CARD_BYTES = 65536
MAX_FROM_RANK_BYTES = MAX_CARD_BYTES + 4096


class Whereabouts(msgspec.Struct, frozen=True):
    """Where to find a rank if the store and its standby are both lost: an address at which it listens only then; port 0 if it has none.

    ``pid`` is its process. Ranks with the same ``processes`` can look it up, and no network is between them; empty if that is not known.
    """

    host: str
    port: int
    pid: int
    processes: str


class Join(msgspec.Struct, frozen=True, tag=True):
    """A rank joins.

    ``verdict`` is the first cause, if it knows one and looks for the other survivors; ``place`` is where they find it. The store sets ``certificate``
    to the names in the certificate of the connection. ``job`` is the name of the rank's job, which must be that of the store; empty if it has none.
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
    job: str = ""


class Exchange(msgspec.Struct, frozen=True, tag=True):
    """A rank gives its card to the exchange of this name, and waits for the cards of the other ``members``."""

    name: str
    card: bytes
    members: list[int]


class Progress(msgspec.Struct, frozen=True):
    """The progress of a rank: for each channel the collectives begun, and the messages begun to and from each peer.

    If it ``answers``, a thread of its own moves messages with tags although no call of the program may wait for one.
    """

    calls: dict[int, int]
    sends: dict[int, dict[int, int]]
    receives: dict[int, dict[int, int]]
    answers: bool = False


class Wait(msgspec.Struct, frozen=True):
    """A call that a rank has been in for a while.

    ``digest`` is that of a collective's `CallSignature`, and empty for other calls. ``messages`` are the messages that a call between two ranks waits
    for, as (peer, is a send, number). ``members`` are the ranks of the group. ``meeting`` is the name of an exchange, and empty for other calls.
    ``group`` is the number of the group, if the channel is one of all groups. If ``is_any``, the message of any one peer ends the wait. A peer in ``taken`` that waits in such a call itself answers what it is sent at once; so it
    owes nothing before it has taken so many messages of this rank. If ``is_own``, another thread of the rank could end the wait as well: by a message to the
    rank itself, or by taking the call back.
    """

    channel: int
    sequence: int
    operation: str
    digest: bytes
    awaiting: list[int]
    messages: list[tuple[int, bool, int]]
    members: list[int]
    meeting: str = ""
    group: int | None = None
    is_any: bool = False
    taken: dict[int, int] = {}
    is_own: bool = False

    @property
    def number(self) -> int:
        """The number of the group."""
        return self.channel // 2 if self.group is None else self.group

    @property
    def is_collective(self) -> bool:
        """Whether all members of the group take part in the call by messages of their own."""
        return bool(self.digest)


class Stalled(msgspec.Struct, frozen=True, tag=True):
    """A rank has waited in a call for a while.

    ``wait`` is that call, and ``waits`` are all calls that the rank has been in for a while. If ``quiet``, it is in no other call, and no thread of it
    can make one before one of these ends.
    """

    wait: Wait
    waits: list[Wait]
    progress: Progress
    quiet: bool


class Report(msgspec.Struct, frozen=True, tag=True):
    """A rank has found a failure; ``kind`` is a key of `verdicts.KINDS`, and ``members`` are the ranks that can say more, all if empty."""

    kind: str
    text: str
    peer: int | None = None
    operation: str | None = None
    channel: int | None = None
    sequence: int | None = None
    members: list[int] = []


class Testimony(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Question`: the rank's own call at that place, or the last one that it made.

    ``calls`` is the number of its calls there, and ``waits`` are its long waits.
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
    """A rank has finished with one of its groups; ``progress`` is that on the channels of the group."""

    group: int
    members: list[int]
    progress: Progress


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All ranks have joined.

    ``key`` proves membership on data connections. ``hosts`` has equal numbers for ranks of one host. ``places`` are for the survivors if the store and its
    standby are both lost. ``certificates`` are the names in the certificates of all ranks, which later connections must show; empty if there are none.
    """

    key: bytes
    hosts: list[int]
    places: list[Whereabouts | None]
    certificates: list[str] = []


class Cards(msgspec.Struct, frozen=True, tag=True):
    """The cards of an exchange, in the order of its members.

    From ``number`` on, as many numbers as there are members belong to this exchange alone.
    """

    name: str
    cards: list[bytes]
    number: int


class Checkpoint(msgspec.Struct, frozen=True, tag=True):
    """A digest of a rank's calls on devices: after the same number of calls at one place, all members must have the same."""

    place: str
    count: int
    digest: bytes
    members: list[int]


class Disbanded(msgspec.Struct, frozen=True, tag=True):
    """All members have finished with a group."""

    group: int


class Shrink(msgspec.Struct, frozen=True, tag=True):
    """A survivor asks to continue with the others. If it is the first of them, it listens for them at this address.

    It waits for newcomers for ``patience_s`` at most. If ``accepts_joiners``, newcomers can join on its host. ``attempt`` counts its requests.
    ``certificate`` are the names in its certificate, if names are compared.
    """

    host: str
    port: int
    patience_s: float = 0.0
    accepts_joiners: bool = False
    attempt: int = 0
    certificate: str | None = None


class Agree(msgspec.Struct, frozen=True, tag=True):
    """A rank gives its flag to an agreement of ``members``, and waits for the flags of the other survivors among them.

    If the agreement has ended for it (``is_told``), it gives the result to a store that has taken over. ``attempt`` counts how often it gave up before.
    """

    name: str
    flag: int
    members: list[int]
    attempt: int = 0
    is_told: bool = False


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """A rank's wait for an agreement has timed out; without a name, its wait for the other survivors to ask to continue."""

    timeout_s: float
    agreement: str = ""
    attempt: int = 0


class JobReformed(msgspec.Struct, frozen=True, tag=True):
    """These ranks are in the next job, and no others may continue beside them. A rank reports itself, and passes on what it learns."""

    ranks: list[int]


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """The first cause of the job's failure, alike for all ranks."""

    kind: str
    text: str
    peer: int | None = None
    operation: str | None = None
    sequence: int | None = None


class Standby(msgspec.Struct, frozen=True, tag=True):
    """A rank is ready to take over when the store is lost, and listens for the others at this address."""

    host: str
    port: int


class Orphaned(msgspec.Struct, frozen=True, tag=True):
    """A rank tells the standby that its connection to the store has ended."""

    reason: str


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """The standby knows the first cause. If it has found another one before, that one counts."""

    verdict: Verdict


class Question(msgspec.Struct, frozen=True, tag=True):
    """The store asks what a rank knows about the call ``sequence`` of ``channel``."""

    inquest: int
    channel: int
    sequence: int


class Decided(msgspec.Struct, frozen=True, tag=True):
    """The store tells its standby the first cause, before all others."""

    verdict: Verdict


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """A rank is to become the standby of the store with rank ``store``; ``gone`` are the ranks that have ended or said goodbye."""

    store: int
    gone: list[int] = []


class Successor(msgspec.Struct, frozen=True, tag=True):
    """The rank that is the standby, and the address at which it listens for the others."""

    rank: int
    host: str
    port: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended, in the first failure or later."""

    rank: int
    reason: str


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """All ranks have left."""


class Shrunk(msgspec.Struct, frozen=True, tag=True):
    """The ranks that continue, in order, and the address at which the first of them waits for the others; or why they cannot continue.

    Newcomers stand behind the survivors, with numbers behind those of the job that has failed; ``you`` is the number of the newcomer that gets this.
    ``attempt`` is that of the request, and 0 if there was none. ``certificate`` are the names in the certificate of the first rank.
    """

    ranks: list[int]
    host: str
    port: int
    problem: Verdict | None = None
    you: int = -1
    attempt: int = 0
    certificate: str | None = None


class Agreement(msgspec.Struct, frozen=True, tag=True):
    """The result of an agreement, or why this ``attempt`` of the rank that gets this has none."""

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
    """Return the message in a frame; None if the frame cannot be read."""
    if frame is None:
        return None
    try:
        return _from_rank.decode(frame)
    except UNREADABLE:
        return None


def decode_from_store(frame: bytes | None) -> FromStore | None:
    """Return the message in a frame; None if the frame cannot be read."""
    if frame is None:
        return None
    try:
        return _from_store.decode(frame)
    except UNREADABLE:
        return None


def ranks_in(message: FromRank | FromStore) -> Iterator[int]:
    """Yield numbers in a message: if these are ranks of this job, so are all that must be. Ranks that continue, or that are gone, may be newcomers.

    Of a list, these are the least and the greatest: a store hears of all ranks from each of them.
    """
    match message:
        case Exchange() | Checkpoint() | Agree():
            yield from _extremes(message.members)
        case Stalled():
            for wait in (message.wait, *message.waits):
                yield from _ranks_of(wait)
            yield from _ranks_of(message.progress)
        case Testimony():
            for wait in message.waits:
                yield from _ranks_of(wait)
            yield from _ranks_of(message.progress)
        case Report():
            yield from _extremes(message.members)
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
            yield from _extremes(ranks)
        case Prepare(gone=ranks):
            yield message.store
            yield from _extremes(ranks)
        case Leave():
            yield from _ranks_of(message.progress)
        case LeaveGroup():
            yield from _extremes(message.members)
            yield from _ranks_of(message.progress)
        case _:
            pass


def _ranks_of(part: Wait | Progress) -> Iterator[int]:
    if isinstance(part, Wait):
        yield from _extremes(part.members)
        yield from _extremes(part.awaiting)
        yield from (peer for peer, _, _ in part.messages)
    else:
        for counts in (*part.sends.values(), *part.receives.values()):
            yield from counts


def _extremes(ranks: list[int]) -> tuple[int, ...]:
    return (min(ranks), max(ranks)) if ranks else ()
