"""torch's store, where the ranks of `oneaccord` know each other already: no other process reaches it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch

from oneaccord import Group
from oneaccord.api import KeyValueStore
from oneaccord.errors import DeadlineError

if TYPE_CHECKING:

    class _Base:  # what is public has complete types without torch as well
        timeout: timedelta

        def __init__(self) -> None: ...
        def set_timeout(self, timeout: timedelta) -> None: ...
else:
    from torch.distributed import Store as _Base

__all__ = ["GroupStore", "StoreBase"]


class StoreBase(_Base):
    """A store of torch's that is made in Python, for any thread."""

    def clone(self) -> Self:
        """Return this store."""
        return self

    def delete_key(self, key: str) -> bool:
        """Forget a value; return whether there was one."""
        raise NotImplementedError

    def num_keys(self) -> int:
        """Return how many values are kept."""
        raise NotImplementedError

    # Two methods torch's C++ looks for by other names than its Python

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        """Do the same as `delete_key`."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:  # noqa: N802
        """Do the same as `num_keys`."""
        return self.num_keys()


class GroupStore(StoreBase):
    """torch's store over a `oneaccord.api.KeyValueStore`. Every rank of the group must make it.

    Parameters
    ----------
    group
        The ranks; rank 0 keeps the values.
    timeout
        The most time that a query may last, if it names none itself.
    """

    def __init__(self, group: Group, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._store = KeyValueStore(group, timeout_s=timeout.total_seconds())

    def set(self, key: str, value: Any) -> None:
        """Keep a value."""
        self._store.set(key, _bytes(value), timeout_s=self._seconds())

    def get(self, key: str) -> bytes:
        """Return a value; wait until it is there."""
        try:
            return self._store.get(key, timeout_s=self._seconds())
        except DeadlineError as error:
            raise _as_of_torch(error) from error

    def append(self, key: str, value: Any) -> None:
        """Put bytes behind a value."""
        self._store.append(key, _bytes(value), timeout_s=self._seconds())

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return it."""
        return self._store.add(key, amount, timeout_s=self._seconds())

    def compare_set(self, key: str, expected: Any, value: Any) -> bytes:
        """Keep a value if the one that is there is as expected; return the one that is there then."""
        return self._store.compare_set(key, _bytes(expected), _bytes(value), timeout_s=self._seconds())

    def delete_key(self, key: str) -> bool:
        """Forget a value; return whether there was one."""
        return self._store.delete(key, timeout_s=self._seconds())

    def num_keys(self) -> int:
        """Return how many values are kept."""
        return self._store.count(timeout_s=self._seconds())

    def check(self, keys: list[str]) -> bool:
        """Return whether all of some values are there."""
        return self._store.check(keys, timeout_s=self._seconds())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of some values are there."""
        try:
            self._store.wait(keys, timeout_s=self._seconds() if timeout is None else timeout.total_seconds())
        except DeadlineError as error:
            raise _as_of_torch(error) from error

    def has_extended_api(self) -> bool:
        """Return that there are `append`, `multi_get` and `multi_set`; torch makes the last two of others."""
        return True

    def _seconds(self) -> float:
        return self.timeout.total_seconds()


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _as_of_torch(error: DeadlineError) -> Exception:
    """Return the error that programs of torch's expect from a store: torch's own code tells it apart, too."""
    translated: Exception = torch.distributed.DistStoreError(str(error))
    return translated
