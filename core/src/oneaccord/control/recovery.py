"""What a survivor asks of the store after a failure: to continue with the other survivors, and to agree with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from oneaccord.contract.deadline import Deadline
from oneaccord.contract.runtime import Condition
from oneaccord.control import timing
from oneaccord.control.protocol import Agree, Agreement, FromRank, GiveUp, JobReformed, Shrink, Shrunk, Verdict
from oneaccord.control.verdicts import error_from
from oneaccord.net.network import Address

__all__ = ["Recovery"]

T = TypeVar("T")


class Recovery:
    """The requests and answers of this rank: all that the next store must hear again if this one is lost.

    Parameters
    ----------
    rank
        This rank.
    post
        Sends a message to the store; never blocks.
    changed
        Guards this, and is notified of answers.

    Attributes
    ----------
    cut
        The reason why no store will ever answer; None while one may.
    reformed
        The ranks that are in the next job already.
    """

    def __init__(self, rank: int, post: Callable[[FromRank], None], changed: Condition) -> None:
        self._rank = rank
        self._post = post
        self._changed = changed
        self._store = 0
        self._attempts = 0
        self._shrink: Shrink | None = None
        self._shrunk: Shrunk | None = None
        self._agreeing: dict[str, Agree] = {}
        self._agreed: dict[str, Agreement] = {}
        self._settled: dict[int, Agree] = {}
        self._giving_up: dict[str, GiveUp] = {}
        self.reformed: set[int] = set()
        self.cut: Verdict | None = None

    def shrink(
        self, address: Address, deadline: Deadline, *, accepts_joiners: bool = False, certificate: str | None = None
    ) -> Shrunk:
        """Ask to continue with the other survivors, and wait until all of them ask. The first of them waits for the others at its address.

        ``certificate`` holds the names in this rank's certificate.

        Raises
        ------
        PeerLostError
            The store and its standby are lost.
        DeadlineError
            A rank neither asked nor ended in time.
        """
        with self._changed:
            self._shrunk = None
            self._attempts += 1
            self._shrink = Shrink(*address, deadline.remaining() / 2, accepts_joiners, self._attempts, certificate)
            self._giving_up.pop("", None)
            self._post(self._shrink)
        shrunk = self._await_answer(lambda: self._shrunk, deadline, GiveUp(deadline.timeout_s, attempt=self._attempts))
        with self._changed:
            self._shrink = None
        if shrunk is not None and shrunk.problem is None:
            if shrunk.you >= 0:  # a newcomer, which had no number before
                self._rank = shrunk.you
            return shrunk
        problem = None if shrunk is None else shrunk.problem
        raise error_from(self._no_answer(problem, "shrink", "shrink()", deadline), self._rank)

    def agree(self, channel: int, name: str, flag: int, members: Sequence[int], deadline: Deadline) -> int:
        """Give this rank's flag; return the bitwise and of the flags of all surviving members, the same on all of them.

        Parameters
        ----------
        channel
            The channel of the group.
        name
            The name of the agreement, the same on all members.
        flag
            An integer of 64 bits.
        members
            The ranks that take part.
        deadline
            The end of the wait.

        Raises
        ------
        PeerLostError
            The store and its standby are lost.
        DeadlineError
            A member neither came nor ended in time; all that waited for it raise the same.
        """
        with self._changed:
            before, agreed = self._agreeing.get(name), self._agreed.pop(name, None)
            attempt = 0 if before is None else before.attempt + 1
            # If there is an answer already, the agreement has ended for the others, although this rank had given up.
            if agreed is None or agreed.problem is not None:
                message = self._agreeing[name] = Agree(name, flag, list(members), attempt)
                agreed = None
                self._giving_up.pop(name, None)
                self._post(message)
        if agreed is None:
            agreed = self._await_answer(lambda: self._agreed.get(name), deadline, GiveUp(deadline.timeout_s, name, attempt))
        if agreed is not None:
            with self._changed:
                self._agreed.pop(name, None)
                if agreed.problem is None:
                    self._settled[channel] = self._agreeing.pop(name)
                    return agreed.flag
        raise error_from(self._no_answer(None if agreed is None else agreed.problem, "agree", name, deadline), self._rank)

    def forget(self, channel: int) -> None:
        """Forget what a group has agreed on that all its members have finished with."""
        with self._changed:
            self._settled.pop(channel, None)

    def end(self, why: Verdict) -> None:
        """End all waits: no store will answer."""
        with self._changed:
            self.cut = why
            self._changed.notify_all()

    def turn_to(self, store: int) -> list[GiveUp]:
        """Repeat to the next store what this rank waits for, and what the former one has answered; return the timeouts that it has not answered."""
        with self._changed:
            self._store = store
            reformed = JobReformed(sorted(self.reformed)) if self.reformed else None
            for message in (reformed, self._shrink, *self._settled.values(), *self._agreeing.values()):
                if message is not None:
                    self._post(message)
            return list(self._giving_up.values())

    def give_up_again(self, message: GiveUp) -> None:
        """Repeat a timeout to the next store, once the others have come to it, unless it has been answered."""
        with self._changed:
            if self._giving_up.get(message.agreement) is message:
                self._post(message)

    def take(self, message: Shrunk | Agreement | JobReformed) -> None:
        """Take in an answer of the store."""
        with self._changed:
            match message:
                case Shrunk(attempt=attempt) if attempt in (
                    0,
                    self._attempts,
                ):  # else it answers a request that has been given up
                    # The request is withdrawn at once: to the next store this rank would seem to wait, at an address that it has left.
                    self._shrunk, self._shrink = message, None
                    self._giving_up.pop("", None)
                case Agreement():
                    self._take_agreement(message)
                case JobReformed(ranks):
                    self.reformed.update(ranks)
            self._changed.notify_all()

    def _take_agreement(self, message: Agreement) -> None:
        asked = self._agreeing.get(message.name)
        if asked is None or asked.is_told:
            return
        if message.problem is None:
            # At once: the next store must hear of the answer, since other members may not have got it.
            self._agreeing[message.name] = msgspec.structs.replace(asked, flag=message.flag, is_told=True)
        elif message.attempt == asked.attempt:
            del self._agreeing[message.name]
        else:
            return
        self._giving_up.pop(message.name, None)
        self._agreed[message.name] = message

    def _await_answer(self, find: Callable[[], T | None], deadline: Deadline, timeout: GiveUp) -> T | None:
        """Wait until ``find`` returns an answer; at the deadline report the timeout, since the store knows which ranks are missing."""

        def is_over() -> bool:
            return find() is not None or self.cut is not None

        with self._changed:
            if not self._changed.wait_for(is_over, deadline.remaining()):
                self._giving_up[timeout.agreement] = (
                    timeout  # until there is an answer: the store may be lost before it gives one
                )
                self._post(timeout)
                self._changed.wait_for(is_over, timing.MISSING_S)
            return find()

    def _no_answer(self, problem: Verdict | None, operation: str, what: str, deadline: Deadline) -> Verdict:
        """Return why this rank got no answer; the store's reason, if it gave one."""
        if problem is not None:
            return problem
        if self.cut is not None:
            text = f"{self.cut.text}; the store was there, and its standby does not answer either: this rank cannot continue; start the job anew"
            return Verdict("lost", text, self.cut.peer, operation)
        text = f"{what} did not end within {deadline.timeout_s:g} s: the store with rank {self._store} does not answer"
        return Verdict("deadline", text, self._store, operation)
