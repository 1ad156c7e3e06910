"""Cards: the facts that ranks trade before they begin, as JSON. A card that cannot be read is found before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from oneaccord.common.checks import UNREADABLE
from oneaccord.contract.backend import Damaged

__all__ = ["read_cards", "write_card"]

T = TypeVar("T")


def write_card(value: object) -> bytes:
    """Return plain data as a card.

    Parameters
    ----------
    value
        A dataclass, numbers, texts, lists, dicts and the like, that `read_cards` can read on the other ranks.
    """
    return msgspec.json.encode(value)


def read_cards(cards: Sequence[bytes], kind: type[T]) -> list[T]:
    """Return the values of the cards of an exchange.

    Parameters
    ----------
    cards
        One of each rank, in order.
    kind
        The type of each card: a dataclass, ``dict[str, int]`` and the like; every value has its declared type.

    Raises
    ------
    Damaged
        A card cannot be read, or is not of this kind; the error's rank is its place in ``cards``. All ranks have the same
        cards, so all of them find it, and the job ends with a ProtocolError.
    """
    decoder = msgspec.json.Decoder(kind)
    read: list[T] = []
    for rank, card in enumerate(cards):
        try:
            read.append(decoder.decode(card))
        except UNREADABLE as error:
            raise Damaged(rank, f"the card that it sent to the other ranks cannot be read: {error}") from None
    return read
