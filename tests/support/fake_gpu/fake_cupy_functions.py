"""The functions of the fake CuPy. They are NumPy's, queued on the current stream, and take what CuPy's take."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from support.fake_gpu.fake_cupy_array import asarray, computed, empty, empty_like, ndarray, peel

__all__ = ["FUNCTIONS", "fft", "linalg"]


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function of this module its name there."""
    function.__name__ = function.__qualname__ = name
    return function


class ufunc:  # noqa: N801
    """As CuPy's: of arrays of CuPy and numbers."""

    def __init__(self, found: np.ufunc) -> None:
        self.name = f"cupy_{found.__name__}"
        self.__name__ = self.name
        self._ufunc = found

    def __call__(self, *args: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind") -> Any:
        nin = self._ufunc.nin
        if len(args) > nin:
            *args, out = args  # type: ignore[assignment]
        if len(args) != nin:
            raise TypeError(f"Wrong number of arguments for {self.name!r}")
        if not any(isinstance(each, ndarray) for each in (*args, out)):
            args = tuple(map(asarray, map(peel, args)))  # numbers alone give an array as well
        return computed(self._ufunc, *args, out=out, dtype=dtype, casting=casting)

    def at(self, a: ndarray, indices: Any, b: Any = None) -> None:
        if self.name != "cupy_add":
            raise NotImplementedError(f"`{self.name}.at` is not supported yet")
        a.scatter_add(indices, b)

    def reduce(self, array: ndarray, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        if self.name == "cupy_add":
            return array.sum(axis, dtype, out, keepdims)
        if self.name == "cupy_multiply":
            return array.prod(axis, dtype, out, keepdims)
        raise NotImplementedError(f"`{self.name}.reduce` is not supported yet")


_UFUNCS = """
abs absolute acos acosh add arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh bitwise_and bitwise_count
bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor cbrt ceil conj conjugate copysign cos cosh deg2rad
degrees divide divmod equal exp exp2 expm1 fabs float_power floor floor_divide fmax fmin fmod frexp gcd greater greater_equal heaviside hypot
invert isfinite isinf isnan lcm ldexp left_shift less less_equal log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
logical_xor maximum minimum mod modf multiply negative nextafter not_equal positive pow power rad2deg radians reciprocal remainder
right_shift rint sign signbit sin sinh sqrt square subtract tan tanh true_divide trunc
""".split()


def _method(name: str) -> Callable[..., Any]:
    """Return the function of an array that is its method."""

    def function(a: ndarray, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(a, ndarray):
            raise AttributeError(f"{type(a).__name__!r} object has no attribute of CuPy's {name!r}")
        return getattr(a, name)(*args, **kwargs)

    return _named(name, function)


def _of_arrays(name: str) -> Callable[..., Any]:
    """Return a function of NumPy whose first arguments, or those in a first list, are arrays."""
    found = getattr(np, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        if "out" in kwargs and name not in _INTO:
            raise TypeError(f"{name}() got an unexpected keyword argument 'out'")
        operands = [each for each in args if isinstance(each, ndarray)]
        if len(operands) == 0 or any(isinstance(each, np.ndarray) for each in args):
            raise TypeError(f"Unsupported type {type(args[0])}")
        others = args[len(operands) :]
        return computed(lambda *arrays, **kw: found(*arrays, *others, **kw), *operands, **kwargs)

    return _named(name, function)


def _joining(name: str) -> Callable[..., Any]:
    found = getattr(np, name)

    def function(tup: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> Any:
        tup = list(tup)
        if not all(isinstance(each, ndarray) for each in tup):
            raise TypeError("Only cupy arrays can be concatenated")
        return computed(lambda *arrays, **kw: found(arrays, axis, **kw), *tup, out=out, casting=casting, dtype=dtype)

    return _named(name, function)


def _view_of(name: str) -> Callable[..., Any]:
    """Return a function of NumPy that gives a view."""
    found = getattr(np, name)
    return _named(name, lambda a, /, *args, **kwargs: a._viewed(found(a._view, *args, **kwargs)))


def _waiting(name: str) -> Callable[..., Any]:
    """Return a function whose result has a shape that the values tell, so that the host waits for them."""
    found = getattr(np, name)

    def function(a: ndarray, /, *args: Any, **kwargs: Any) -> Any:
        result = found(a.get(), *args, **kwargs)
        return tuple(map(asarray, result)) if isinstance(result, tuple) else asarray(result)

    return _named(name, function)


_METHODS = "sum prod mean var std max min all any ravel transpose squeeze swapaxes round".split()
_OTHERS = (
    "argmax argmin argsort sort cumsum cumprod tensordot vdot outer cross diff tril triu roll flip repeat tile isclose".split()
)
_INTO = frozenset("argmax argmin cumsum cumprod outer".split())
"""Those of the others that take an array for the result."""
FUNCTIONS: dict[str, Any] = {name: ufunc(getattr(np, name)) for name in _UFUNCS}
"""The functions of CuPy, by name."""
for _names, _make in (
    (_METHODS, _method),
    (_OTHERS, _of_arrays),
    (["concatenate", "stack"], _joining),
    (["moveaxis", "expand_dims", "broadcast_to", "diagonal"], _view_of),
    (["unique", "nonzero", "argwhere", "count_nonzero"], _waiting),
):
    FUNCTIONS |= {_name: _make(_name) for _name in _names}
FUNCTIONS |= {"amax": FUNCTIONS["max"], "amin": FUNCTIONS["min"]}


def matmul(x1: Any, x2: Any, /, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> ndarray:
    return computed(np.matmul, peel(x1), peel(x2), out=out, dtype=dtype, casting=casting)


def reshape(a: ndarray, newshape: Any, order: str = "C", *, copy: bool | None = None) -> ndarray:
    return (a.copy(order) if copy else a).reshape(newshape, order=order)


def astype(x: ndarray, dtype: Any, /, *, copy: bool = True) -> ndarray:
    return x.astype(dtype, copy=copy)


def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None:
        return FUNCTIONS["nonzero"](condition)
    return computed(np.where, asarray(condition) if isinstance(condition, bool) else condition, x, y)


def clip(a: ndarray, a_min: Any, a_max: Any, out: Any = None) -> ndarray:
    limits = [each for each in (a_min, a_max) if each is not None]
    return computed(
        lambda given, *found: np.clip(
            given, *((found[0] if a_min is not None else None), found[-1] if a_max is not None else None)
        ),
        a,
        *limits,
        out=out,
    )


def take(a: ndarray, indices: Any, axis: Any = None, out: Any = None) -> ndarray:
    return a.ravel()[asarray(indices)] if axis is None else a[(*(slice(None),) * (axis % a.ndim), asarray(indices))]


def take_along_axis(a: ndarray, indices: ndarray, axis: Any) -> ndarray:
    grid = list(np.indices(indices.shape, sparse=True))
    return a[tuple(indices if number == axis % a.ndim else each for number, each in enumerate(grid))]


def broadcast_arrays(*args: ndarray) -> list[ndarray]:
    shape = np.broadcast_shapes(*(each.shape for each in args))
    return [FUNCTIONS["broadcast_to"](each, shape) for each in args]


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    result = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order)
    result.fill(fill_value)
    return result


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, np.dtype(dtype), order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, np.dtype(dtype), order)


def full_like(
    a: ndarray, fill_value: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> ndarray:
    result = empty_like(a, dtype, order, subok, shape)
    result.fill(fill_value)
    return result


def zeros_like(a: ndarray, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None) -> ndarray:
    return full_like(a, 0, dtype, order, subok, shape)


def ones_like(a: ndarray, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None) -> ndarray:
    return full_like(a, 1, dtype, order, subok, shape)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    return asarray(np.arange(start, stop, step, dtype=dtype) if stop is not None else np.arange(start, dtype=dtype))


def eye(N: int, M: int | None = None, k: int = 0, dtype: Any = float, order: str = "C") -> ndarray:  # noqa: N803
    return asarray(np.eye(N, M, k, dtype))


def linspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, *, dtype: Any = None) -> ndarray:
    return asarray(np.linspace(start, stop, num, endpoint, dtype=dtype))


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    found = asarray(a, dtype)
    found = found if found.ndim else found.reshape(1)
    return found if found.flags.c_contiguous else found.copy()


FUNCTIONS |= {
    each.__name__: each
    for each in (
        matmul,
        reshape,
        astype,
        where,
        clip,
        take,
        take_along_axis,
        broadcast_arrays,
        full,
        zeros,
        ones,
        full_like,
        zeros_like,
        ones_like,
        arange,
        eye,
        linspace,
        ascontiguousarray,
    )
}
FUNCTIONS["broadcast_shapes"] = np.broadcast_shapes


def _submodule(name: str, **names: Any) -> Any:
    module = types.ModuleType(f"cupy.{name}")
    module.__dict__.update(names)
    return module


def _qr(a: ndarray, mode: str = "reduced") -> Any:
    if a.dtype.char not in "efdFD":
        raise TypeError(f"array type {a.dtype} is unsupported in linalg")
    if mode == "r":
        return computed(lambda given: np.linalg.qr(given, mode), a)
    return computed(lambda given: tuple(np.linalg.qr(given, mode)), a)


def _solver(name: str) -> Callable[..., Any]:
    found = getattr(np.linalg, name)
    return _named(name, lambda *args, **kwargs: computed(lambda *arrays: found(*arrays, **kwargs), *args))


linalg: Any = _submodule(
    "linalg",
    matmul=matmul,
    qr=_named("qr", _qr),
    **{name: _solver(name) for name in ("norm", "inv", "solve", "det", "cholesky", "lstsq", "pinv")},
)
fft: Any = _submodule("fft")
