"""Reductions by a user's function, by a value and its location, and the identities of reductions."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oneaccord.common.checks import safe_str
from oneaccord.errors import DTypeError, LayoutError, SizeMismatchError, UsageError

__all__ = ["LOCATING", "Combine", "Function", "Op", "first_of", "locating", "neutral", "with_index"]

Array = npt.NDArray[Any]
Function = Callable[[Array, Array], Array]
"""A value of ``op=`` without a name: ``fn(a, b)`` returns the reduction of two arrays, element by element."""

_LONGEST_NAME = 200
_SAMPLE = 2
"""Number of elements on which a function is tried before any byte moves."""

LOCATING: dict[str, np.ufunc] = {"minloc": np.less, "maxloc": np.greater}
"""The reductions of values with their locations, each with the comparison by which a value is better."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A reduction by a function of your own, for ``op=``; give the same on all ranks.

    ``oa.Op(fn, name=None, commutative=True, identity=None)``. A plain function will do if it is associative and commutative.

    Parameters
    ----------
    fn
        ``fn(a, b)`` reduces two arrays element by element. It gets two read-only arrays of shape ``(n,)``, which hold
        neighbouring elements of the arrays of two ranks or of earlier results. It returns a new array of the same shape and
        dtype (``a`` or ``b`` itself will do). It cannot know how the elements are divided, so no element of the result may
        depend on its neighbours. It may be tried on part of the input first. It must be associative. It must not call the
        group, and must not keep the arrays, because other calls write to them. Give the same function each time: a new one,
        such as a lambda in a loop, is prepared again.
    name
        The name that messages show and ranks compare, at most 200 characters. The default is the function's name; for a lambda,
        its line and a digest of its code. Functions made by ``functools.partial`` need a name, because ranks cannot compare them otherwise.
    commutative
        Whether ``fn(a, b)`` and ``fn(b, a)`` are the same. If not, operands are combined in the order of ranks.
    identity
        The element that leaves every other one unchanged under ``fn``, as a scalar or a tuple of the fields. `Group.exscan`
        needs it.

    Raises
    ------
    UsageError
        ``fn`` is not a function, or ``name`` is not a text of 1 to 200 characters.
    """

    fn: Function
    _: KW_ONLY
    name: str | None = None
    commutative: bool = True
    identity: object = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise UsageError(f"oa.Op takes a function of two arrays, not {self.fn!r}")
        name: object = _name_of(self.fn) if self.name is None else self.name
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
            raise UsageError(f"the name of an op must be a text of 1 to {_LONGEST_NAME} characters, not {name!r}")
        object.__setattr__(self, "name", name)

    def __str__(self) -> str:
        """Return the name that ranks compare and messages show."""
        order = "" if self.commutative else ", commutative=False"
        identity = "" if self.identity is None else f", identity={self.identity!r}"
        return f"Op({self.name}{order}{identity})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Op) and (self.fn, str(self)) == (other.fn, str(other))

    def __hash__(self) -> int:
        return hash((self.fn, str(self)))


def _name_of(fn: Function) -> str:
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__qualname__
    code = getattr(fn, "__code__", None)
    if code is None or not name.endswith("<lambda>"):
        return name[-_LONGEST_NAME:]
    # Two lambdas may be in one line; only their code distinguishes them.
    plain = [
        each for each in code.co_consts if isinstance(each, int | float | complex | str)
    ]  # other constants may print an address
    digest = zlib.crc32(repr((code.co_code, code.co_names, plain)).encode())
    return f"{name} of line {code.co_firstlineno} ({digest:08x})"[-_LONGEST_NAME:]


class Combine:
    """Combines two arrays by a user's function, and checks its results.

    Parameters
    ----------
    op
        The reduction.
    dtype
        The dtype of all arrays.
    """

    __slots__ = ("_dtype", "_fn", "_is_tried", "_what")

    def __init__(self, op: Op, dtype: np.dtype[Any]) -> None:
        self._fn = op.fn
        self._what = f"op={op}"
        self._dtype = dtype
        self._is_tried = False

    def __call__(self, left: Array, right: Array, out: Array) -> None:
        """Write ``fn(left, right)`` to ``out``, which may be either; raises as `_apply`."""
        if out.size:
            out[...] = self._apply(left, right).reshape(out.shape)

    def try_on(self, array: Array) -> None:
        """Try the function once on some elements of the input, and raise an error if it is not a reduction.

        Raises
        ------
        DTypeError, LayoutError, SizeMismatchError, UsageError
            It returns something other than it must, writes into its arguments, or does not take two.
        """
        if self._is_tried or not array.size:
            return
        sample = array.flat[:_SAMPLE]
        try:
            self._apply(sample, sample)
        except (DTypeError, LayoutError, SizeMismatchError):
            raise
        except UsageError as error:
            if isinstance(error.__cause__, TypeError):
                raise
            return  # the cause may be these elements, which the reduction itself may never combine
        self._is_tried = True

    def _apply(self, left: Array, right: Array) -> Array:
        """Return the function's result.

        Raises
        ------
        DTypeError, LayoutError, SizeMismatchError, UsageError
            As `try_on`; or the function raised an exception, which is the cause.
        """
        first, second = left.reshape(-1), right.reshape(-1)
        first.flags.writeable = second.flags.writeable = False
        try:
            result: object = self._fn(first, second)
        except Exception as error:
            if isinstance(error, ValueError) and "read-only" in str(error):
                raise LayoutError(
                    f"{self._what} writes into its arguments, which are read-only: let it return a new array (a + b, not a += b)"
                ) from error
            raise UsageError(f"{self._what} raised {type(error).__name__}: {safe_str(error)}") from error
        expected = f"for two arrays of {self._dtype}{list(first.shape)} it must return one like them"
        if not isinstance(result, np.ndarray):
            raise DTypeError(
                f"{self._what} returned a {type(result).__name__}, but {expected}: it gets neighbouring elements as flat arrays, and "
                "reduces each on its own; a matrix is one element only with such a dtype as np.dtype([('m', float, (2, 2))])"
            )
        if result.dtype != self._dtype:
            raise DTypeError(
                f"{self._what} returned an array of {result.dtype}, but {expected}: let it end with .astype(a.dtype), or convert the input first"
            )
        if result.shape != first.shape:
            raise SizeMismatchError(
                f"{self._what} returned an array of shape {list(result.shape)}, but {expected}: each element is reduced on its own"
            )
        return result


def locating(op: str, dtype: np.dtype[Any]) -> Callable[..., None]:
    """Return a function that combines values with their locations.

    The better value wins, and of equal values the one with the smaller location. A NaN is better than any number, as in `numpy.argmin`.

    Raises
    ------
    DTypeError
        The dtype is not a pair of a value that has an order and an integer.
    """
    fields = [dtype[name] for name in dtype.names or ()]
    if len(fields) != 2 or any(field.shape for field in fields) or fields[0].kind == "c" or fields[1].kind not in "iu":
        raise DTypeError(
            f'op="{op}" needs structured arrays with two fields, a value (not complex) and its location (an integer), such as '
            f"oa.with_index(x, group.rank) makes; an array of {dtype} was given"
        )
    is_better = LOCATING[op]
    value, location = dtype.names or ("", "")

    def combine(left: Array, right: Array, out: Array) -> None:
        first, second = left[value], right[value]
        lost, found = first != first, second != second  # noqa: PLR0124 - NaN alone is not equal to itself
        same = (first == second) | (lost & found)
        takes = is_better(second, first) | (found & ~lost) | (same & (right[location] < left[location]))
        result = left.copy()
        np.copyto(result, right, where=takes)
        out[...] = result

    return combine


def neutral(op: str, dtype: np.dtype[Any]) -> object:
    """Return the identity of a reduction that has a name."""
    if op in LOCATING:
        value, location = (dtype[name] for name in dtype.names or ())
        return neutral(op[:3], value), np.iinfo(location).max
    if op in ("sum", "or", "xor"):
        return 0
    if op == "product":
        return 1
    if op == "and":
        return True if dtype.kind == "b" else np.invert(np.zeros((), dtype))
    is_least = op == "max"
    if dtype.kind == "b":
        return not is_least
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min if is_least else limits.max
    infinity = np.asarray(np.inf).astype(dtype)
    if np.isinf(infinity):
        return -infinity if is_least else infinity
    import ml_dtypes  # some 8-bit floats have no infinity

    finfo: Any = ml_dtypes.finfo
    limit: object = finfo(dtype).min if is_least else finfo(dtype).max
    return limit


def first_of(identity: object, dtype: np.dtype[Any], what: str) -> Array:
    """Return an identity as an array of shape ().

    Raises
    ------
    UsageError
        It is not an element of the dtype.
    """
    try:
        found: Array = np.array(identity, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{what}: its identity is not an element of {dtype}: {safe_str(error)}") from error
    if found.shape:
        raise UsageError(f"{what}: its identity is an array of shape {list(found.shape)}; give a single element of {dtype}")
    return found


def with_index(values: npt.ArrayLike, index: npt.ArrayLike) -> Array:
    """Return values with their locations, for ``op="minloc"`` and ``op="maxloc"``.

    Parameters
    ----------
    values
        Any shape; numbers that have an order, or bools.
    index
        The location of each value: integers of a shape that broadcasts to that of ``values``, such as the rank.

    Returns
    -------
    ndarray
        The shape of ``values``; a structured array with the fields ``"value"``, of the dtype of ``values``, and ``"index"``, int64.

    Raises
    ------
    DTypeError
        ``index`` does not hold integers, or one beyond int64.
    SizeMismatchError
        ``index`` does not broadcast to the shape of ``values``.
    """
    numbers, places = np.asarray(values), np.asarray(index)
    if places.dtype.kind not in "iu":
        raise DTypeError(f"index= of with_index has dtype {places.dtype}, but locations must be integers")
    if places.max(initial=0) > np.iinfo(np.int64).max:
        raise DTypeError(f"index= of with_index holds {places.max()}, but locations are int64: use smaller numbers")
    pairs = np.empty(numbers.shape, [("value", numbers.dtype), ("index", np.int64)])
    pairs["value"] = numbers
    try:
        pairs["index"] = places
    except ValueError as error:
        raise SizeMismatchError(
            f"index= of with_index has shape {list(places.shape)}, which does not broadcast to the shape of values, {list(numbers.shape)}"
        ) from error
    return pairs
