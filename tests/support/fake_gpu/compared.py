"""How a stand-in differs from what it stands in for, as far as names and parameters tell.

A stand-in may have less. What it has must be there in earnest, and each call that it takes must be one that the real one takes.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import types
from collections.abc import Iterable, Iterator
from inspect import Parameter
from typing import Any

__all__ = ["differences", "parameters"]

_SIGNATURE = re.compile(r"^[\w.]+\((?P<inside>.*)\)(?: *->.*)?$")
_COMMA = re.compile(r",(?![^(\[]*[)\]])")  # none within brackets
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _parsed(text: str) -> list[Parameter] | None:
    """Return the parameters that Cython writes into the first line of a docstring: ``f(intptr_t event, int flags=0) -> int``."""
    match = _SIGNATURE.match(text)
    if match is None:
        return None
    found, kind = [], Parameter.POSITIONAL_OR_KEYWORD
    for word in filter(None, (each.strip(" \\") for each in _COMMA.split(match["inside"]))):
        stars = len(word) - len(word.lstrip("*"))
        name, _, default = word.lstrip("*").partition("=")
        if not name:  # a bare *
            kind = Parameter.KEYWORD_ONLY
            continue
        if name == "/":
            found = [each.replace(kind=Parameter.POSITIONAL_ONLY) for each in found]
            continue
        name = name.partition(":")[0].split()[-1].lstrip("*")
        if not name.isidentifier():  # f(x[, out1, out2])
            return None
        own = {0: kind, 1: Parameter.VAR_POSITIONAL, 2: Parameter.VAR_KEYWORD}[stars]
        found.append(Parameter(name, own, default=default or Parameter.empty))
        if stars == 1:
            kind = Parameter.KEYWORD_ONLY
    return found


def parameters(function: Any) -> list[Parameter] | None:
    """Return the parameters of a function or of the maker of a class, without itself; None where nothing tells of them."""
    found: list[Parameter] | None = None
    with contextlib.suppress(TypeError, ValueError):
        found = list(inspect.signature(function).parameters.values())
    if found is None or [each.kind for each in found] == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        found = _parsed((getattr(function, "__doc__", None) or "").strip().partition("\n")[0])
    if found is None:
        return None
    return [each for each in found if each.name != "self"]


def _calls(fake: list[Parameter], real: list[Parameter], *, by_name: bool) -> Iterator[str]:
    """Tell which calls the stand-in takes, and the real one does not."""
    own, other = ([each for each in side if each.kind in _POSITIONAL] for side in (fake, real))
    takes_more = {each.kind for each in real}
    names = {each.name: each for each in real}
    for place, parameter in enumerate(own):
        if place >= len(other):
            if Parameter.VAR_POSITIONAL not in takes_more and not (by_name and parameter.name in names):
                yield f"takes {parameter.name} as argument {place + 1}"
            continue
        is_named = by_name and parameter.kind is not Parameter.POSITIONAL_ONLY
        if is_named and parameter.name != other[place].name:
            yield f"calls argument {place + 1} {parameter.name}, in place of {other[place].name}"
        if parameter.default is not Parameter.empty and other[place].default is Parameter.empty:
            yield f"needs no {other[place].name}"
    if not any(each.kind is Parameter.VAR_POSITIONAL for each in fake):
        for parameter in other[len(own) :]:
            if parameter.default is Parameter.empty:
                yield f"takes no {parameter.name}, which must be given"
    for parameter in fake:
        if parameter.kind is Parameter.KEYWORD_ONLY and parameter.name not in names and Parameter.VAR_KEYWORD not in takes_more:
            yield f"takes {parameter.name} by name"


def differences(name: str, fake: Any, real: Any, names: Iterable[str], *, by_name: bool = True) -> Iterator[str]:
    """Tell, in words, which of some names the stand-in has and the real one not, or with other parameters or another value.

    Parameters
    ----------
    name
        What the two are called.
    fake, real
        Two modules, classes, or objects.
    names
        What is compared.
    by_name
        Whether the names of parameters count, as they do for what takes arguments by name.
    """
    for attribute in names:
        if not hasattr(real, attribute):
            yield f"{name}.{attribute} is not in the real one"
            continue
        if not hasattr(fake, attribute):  # of its objects alone
            continue
        own, other = getattr(fake, attribute), getattr(real, attribute)
        if isinstance(own, (types.ModuleType, property)):
            continue
        if callable(own) != callable(other) and not inspect.isgetsetdescriptor(other):
            yield f"{name}.{attribute} is {own!r}, in place of {other!r}"
        elif callable(own):
            fakes, reals = parameters(own), parameters(other)
            if fakes is not None and reals is not None:
                yield from (f"{name}.{attribute} {what}" for what in _calls(fakes, reals, by_name=by_name))
        elif isinstance(own, (int, str, bytes)) and own != other:
            yield f"{name}.{attribute} is {own!r}, in place of {other!r}"
