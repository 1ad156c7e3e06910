"""The order in which a program enters units, learned in one step and used in the next."""

from __future__ import annotations

__all__ = ["Order"]


class Order:
    """The units that a step and the step before have entered, and so the next ones.

    All ranks run the same program, so they learn the same, and gather ahead of need alike.

    Parameters
    ----------
    ahead
        How many units, besides the one that is entered, are to be there.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._learned: list[str] = []
        self._seen: list[str] = []
        self._is_lost = False

    def begin(self) -> None:
        """Begin a step."""
        self._seen, self._is_lost = [], False

    def enter(self, name: str) -> list[str]:
        """Note that a unit is entered; return the units that must be there from now on: this one, and those that come next."""
        place = len(self._seen)
        self._is_lost = self._is_lost or self._learned[place : place + 1] != [name]
        self._seen.append(name)
        return self._window(place) or [name]

    def upcoming(self) -> list[str]:
        """Return the units that must be there once a unit has been left: the next one, and those after it."""
        return self._window(len(self._seen))

    def end(self) -> None:
        """End a step that was complete: the next one is expected to be like it."""
        self._learned = self._seen

    def _window(self, place: int) -> list[str]:
        found: list[str] = []
        if not self._is_lost:
            for name in self._learned[place:]:
                if name not in found:
                    found.append(name)
                if len(found) > self._ahead:
                    break
        return found
