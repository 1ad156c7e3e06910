"""How the ranks of Gloo find each other: through the exchange of oneaccord, which is authenticated, and no store of torch's."""

from __future__ import annotations

from typing import Any

from oneaccord.api import Bootstrap, read_cards, write_card

__all__ = ["make_store"]


def make_store(bootstrap: Bootstrap, distributed: Any) -> Any:
    """Return a store for the constructor of a process group, in which all ranks write and read alike.

    What a rank sets goes to the others when it first waits for what it does not have, and all ranks do so equally often.
    """

    class CardStore(distributed.Store):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._known: dict[str, bytes] = {}
            self._new: dict[str, bytes] = {}
            self._rounds = 0

        def set(self, key: str, value: bytes) -> None:
            self._known[key] = bytes(value)
            self._new[key] = bytes(value)

        def get(self, key: str) -> bytes:
            while key not in self._known:
                self._trade()
            return self._known[key]

        def wait(self, keys: list[str], timeout: object = None) -> None:
            for key in keys:
                self.get(key)

        def check(self, keys: list[str]) -> bool:
            return all(key in self._known for key in keys)

        def _trade(self) -> None:
            self._rounds += 1
            card, self._new = write_card(self._new), {}
            for others in read_cards(bootstrap.exchange(f"gloo {self._rounds}", card), dict[str, bytes]):
                self._known |= others

    return CardStore()
