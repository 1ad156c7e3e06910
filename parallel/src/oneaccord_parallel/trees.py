"""Trees of arrays: dicts, lists, tuples and other containers, with a name for each leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optree

from oneaccord.errors import UsageError

__all__ = ["Spec", "below", "flatten", "named", "partly_named", "rebuild", "register_node"]

Spec = optree.PyTreeSpec
_OURS = "oneaccord_parallel"
"""The namespace of our own nodes: other programs that use optree see nothing of them."""


def flatten(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> tuple[dict[str, Any], Spec]:
    """Return the leaves of a tree by name, and the description that `rebuild` needs to make a tree like it.

    Dicts (by sorted keys), lists, tuples, named tuples and their kin are nodes; None has no leaf; all else is a leaf. The name of a leaf is
    its path, joined by dots: ``{"layers": [{"w": x}]}`` has the leaf ``"layers.0.w"``. A tree that is a single leaf has the name ``""``. Nodes
    for which ``is_leaf`` says so are leaves as well.

    Raises
    ------
    UsageError
        Two leaves have one name, such as those of ``{"a": {"b": x}, "a.b": y}``; or the tree is nested too deep.
    """
    try:
        paths, leaves, spec = optree.tree_flatten_with_path(tree, is_leaf, namespace=_OURS)
    except RecursionError:
        raise UsageError(
            "the tree is nested too deep, or contains itself: give a flatter one, such as a dict of names"
        ) from None
    found: dict[str, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        name = ".".join(map(str, path))
        if name in found:
            raise UsageError(f"two leaves of the tree have the name {name!r}; rename one of the keys that lead to them")
        found[name] = leaf
    return found, spec


def rebuild(spec: Spec, leaves: Mapping[str, Any]) -> Any:
    """Return the tree of ``spec`` with these leaves, in the order in which `flatten` gave them."""
    return optree.tree_unflatten(spec, leaves.values())


def below(spec: Spec, names: Iterable[str]) -> dict[str, Spec]:
    """Return the specs of the subtrees whose paths, joined by dots, are ``names``; nothing for a name that no subtree with leaves has."""
    wanted = set(names)
    found: dict[str, Spec] = {}
    left = [("", spec)]
    while left:
        name, node = left.pop()
        if name in wanted and node.num_leaves:
            found.setdefault(name, node)
        prefix = name + "." if node is not spec else ""
        left += reversed([(f"{prefix}{entry}", child) for entry, child in zip(node.entries(), node.children(), strict=True)])
    return found


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by name; see `flatten`."""
    return flatten(tree)[0]


def partly_named(tree: Any, names: Iterable[str], like: Callable[[], Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the leaves of a tree in which None may stand for any of some names, or for all below a prefix of them.

    Parameters
    ----------
    tree
        The tree.
    names
        The names that its leaves should have.
    like
        Returns a tree with leaves of these names, in which None may stand elsewhere as well.

    Returns
    -------
    tuple
        The leaves by name; those of ``names`` that are neither there nor replaced; and the names, also those of a None, that do not belong there.
    """
    found, gaps, wanted = named(tree), _gaps(tree), dict.fromkeys(names)
    stood_for = {gap: [name for name in wanted if not gap or name == gap or name.startswith(gap + ".")] for gap in gaps}
    missing = wanted.keys() - found.keys() - {name for some in stood_for.values() for name in some}
    idle = {gap for gap, some in stood_for.items() if not some}
    unknown = found.keys() - wanted.keys() | (idle - set(_gaps(like())) if idle else set())
    return found, sorted(missing), sorted(unknown)


def _gaps(tree: Any) -> list[str]:
    """Return the places of None in a tree."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True, namespace=_OURS)
    return [".".join(map(str, path)) for path, leaf in zip(paths, leaves, strict=True) if leaf is None]


def register_node(kind: type, attributes: Sequence[str]) -> None:
    """Let the instances of a class be nodes of trees, with some of their attributes as leaves, which are all that they have."""

    def leaves_of(node: Any) -> Any:
        return [getattr(node, name) for name in attributes], None, tuple(attributes)

    def rebuilt(_: Any, leaves: Iterable[Any]) -> Any:
        node: Any = object.__new__(kind)
        for name, leaf in zip(attributes, leaves, strict=True):
            setattr(node, name, leaf)
        return node

    optree.register_pytree_node(kind, leaves_of, rebuilt, namespace=_OURS)
