"""Seals for data that a bridge sends and then trusts more than plain data, such as pickles of another library."""

from __future__ import annotations

from typing import ClassVar

from oneaccord.contract.seal import TAMPERED, Seal
from oneaccord.control.protocol import Report
from oneaccord.group.group import Group

__all__ = ["Sealer"]


class Sealer:
    """Seals bytes that travel between the ranks of a group in any way, so that only what one of them has sealed is taken.

    A seal is 16 bytes of keyed BLAKE2b. Its key is derived from the secret and the random bytes of the job, from the group, and from
    the purpose. It works on every backend, and needs no ``security.checksum``. An attacker who changes messages on the path can only exchange
    them for others that were sealed for the same group and purpose.

    Parameters
    ----------
    group
        The ranks.
    purpose
        A description of the bytes, in words that are the same on all ranks.

    Attributes
    ----------
    BYTES
        The length of a seal.
    """

    BYTES: ClassVar[int] = Seal.BYTES

    def __init__(self, group: Group, purpose: str) -> None:
        self._group = group
        self._purpose = purpose
        self._key = group._job.key_for(f"{purpose} in group {group._members.number}")

    def of(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return the seal of some bytes.

        Parameters
        ----------
        data
            The bytes.

        Returns
        -------
        bytes
            Their seal.
        """
        return Seal(self._key).of(data)

    def check(self, data: bytes | bytearray | memoryview, seal: bytes | bytearray | memoryview) -> None:
        """Make sure that a rank of the group has sealed these bytes.

        Parameters
        ----------
        data
            The received bytes.
        seal
            The seal that came with them.

        Raises
        ------
        ProtocolError
            They do not belong together. The job has failed with this error on all ranks.
        """
        if Seal(self._key).fits(data, seal):
            return
        job = self._group._job
        self._group._saw()
        raise job.fail(
            Report("protocol", f"rank {job.rank} received {self._purpose} that no rank of this job has sealed: {TAMPERED}")
        )
