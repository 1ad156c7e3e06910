"""The ucc backend: a team of UCC for collectives, and another backend for messages and for all that UCC does not perform."""

from __future__ import annotations

from oneaccord.api import Backend, Bootstrap, Transport, compare_settings, read_cards, require_processes, write_card
from oneaccord_ucc.agreement import Agreement
from oneaccord_ucc.config import UccConfig
from oneaccord_ucc.library import load
from oneaccord_ucc.team import Team

__all__ = ["UccBackend"]

_CHANNEL = (1 << 31) - 2
"""That of the agreements: no group comes so far, and every backend can number it."""


class UccBackend(Backend):
    """UCC between the ranks of a job.

    Parameters
    ----------
    bootstrap
        The identity of this rank, and how it finds the others.

    Attributes
    ----------
    team
        What performs collectives; None in a world of one.
    agreement
        What the ranks compare before and after.

    Raises
    ------
    BackendUnavailableError
        The ranks are threads of one process, UCC is not here, or it refuses something.
    ConfigError
        The ranks have different settings or versions of UCC.
    UnsupportedError
        The other backend moves no host memory.
    RendezvousError
        UCC did not connect the ranks in time.
    DeadlineError, CommError
        Not all ranks came.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        assert isinstance(config, UccConfig)
        require_processes(bootstrap, "ucc")
        ucc = load()
        mine = {"messages": config.messages, "library": ".".join(map(str, ucc.version[:2]))}
        cards = read_cards(bootstrap.exchange("ucc", write_card(mine)), dict[str, str])
        compare_settings("ucc", cards, {"library": "the version of UCC"})
        self._name = config.messages
        self._messages = bootstrap.part(config.messages)
        self.team: Team | None = None
        try:
            self.agreement: Agreement = Agreement(self._messages.open_transport(_CHANNEL), bootstrap.rank, bootstrap.world_size)
            if bootstrap.world_size > 1:
                self.team = Team(ucc, bootstrap, config.spin_us / 1e6)
        except BaseException:
            self._messages.abort()
            self._messages.close()
            raise

    def open_transport(self, channel: int) -> Transport:
        """Return the transport of a channel, which is the other backend's."""
        return self._messages.open_transport(channel)

    def part(self, name: str) -> Backend | None:
        """Return the backend that carries messages, or a part of it."""
        return self._messages if name == self._name else self._messages.part(name)

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory of the other backend."""
        return self._messages.allocate(nbytes)

    def abort(self) -> None:
        """End every wait."""
        if self.team is not None:
            self.team.end("the job was aborted")
        self._messages.abort()

    def close(self) -> None:
        """Let go of UCC and of the other backend."""
        if self.team is not None:
            self.team.close()
        self._messages.close()
