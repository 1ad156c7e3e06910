"""The comparison of fakes with what they stand in for finds what it is meant to find."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_gpu.compared import differences, parameters


class Real:
    """What is stood in for; the last two tell of their parameters as Cython has it."""

    number = 3
    text = "right"

    def call(self, source: int, target: int, flags: int = 0, *, stream: int = 0) -> None: ...

    def any(self, *args: int) -> None: ...


def cython(line: str) -> Any:
    """Return what has its parameters in its docstring alone."""
    made = type("builtin", (), {"__call__": lambda self, *args, **kwargs: None, "__doc__": f"{line}\n\nWords."})
    return made()


def found(fake: type, *, by_name: bool = True) -> list[str]:
    names = [name for name in vars(fake) if not name.startswith("_")]
    return list(differences("it", fake, Real, names, by_name=by_name))


def test_a_fake_may_have_less() -> None:
    class Fake:
        number = 3

        def call(self, source: int, target: int) -> None: ...

        def any(self, first: int, second: int) -> None: ...

    assert found(Fake) == []


@pytest.mark.parametrize(
    ("name", "fake", "difference"),
    [
        ("other", 1, "it.other is not in the real one"),
        ("number", 4, "it.number is 4, in place of 3"),
        ("text", "wrong", "it.text is 'wrong', in place of 'right'"),
        ("call", lambda self, source, aim: None, "it.call calls argument 2 aim, in place of target"),
        ("call", lambda self, source, target=0: None, "it.call needs no target"),
        ("call", lambda self, source: None, "it.call takes no target, which must be given"),
        ("call", lambda self, source, target, flags=0, more=0: None, "it.call takes more as argument 4"),
        ("call", lambda self, source, target, *, mode=0: None, "it.call takes mode by name"),
    ],
)
def test_what_a_fake_has_alone_is_told(name: str, fake: Any, difference: str) -> None:
    assert found(type("Fake", (), {name: fake})) == [difference]


def test_names_of_parameters_do_not_count_where_nobody_gives_them() -> None:
    assert found(type("Fake", (), {"call": lambda self, a, b: None}), by_name=False) == []


@pytest.mark.parametrize(
    ("line", "names", "optional"),
    [
        ("eventQuery(intptr_t event)", ["event"], []),
        ("streamCreate() -> intptr_t", [], []),
        ("f(intptr_t stream, int mode=streamCaptureModeRelaxed)", ["stream", "mode"], ["mode"]),
        ("f(a, axis=(0, 1), *, out=None) -> _ndarray_base", ["a", "axis", "out"], ["axis", "out"]),
        ("base.dot(self, _ndarray_base b, _ndarray_base out=None)", ["b", "out"], ["out"]),
    ],
)
def test_parameters_are_read_from_the_words_of_cython(line: str, names: list[str], optional: list[str]) -> None:
    read = parameters(cython(line))
    assert read is not None
    assert [each.name for each in read] == names
    assert [each.name for each in read if each.default is not each.empty] == optional


@pytest.mark.parametrize("line", ["modf(x[, out1, out2], /)", "Words that are no signature."])
def test_what_does_not_tell_its_parameters_is_not_compared(line: str) -> None:
    assert parameters(cython(line)) is None
