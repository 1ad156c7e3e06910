"""Sharded models of torch and JAX arrays, over shm and tcp; their bits are those of NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord_parallel as mp
from oneaccord.errors import LayoutError, UsageError

SHAPES = {"l0": {"w": (3, 5), "b": (5,)}, "l1": {"w": (5, 1)}}


def trained(group, convert, strategy, adam, dtype="float32"):
    """Train a bit; return the parameters as NumPy's, their kinds, and the bytes that are held."""
    rng = np.random.default_rng(0)
    params = {
        name: {leaf: convert(rng.standard_normal(shape).astype(dtype)) for leaf, shape in unit.items()}
        for name, unit in SHAPES.items()
    }
    store = mp.Sharded(params, group, strategy)
    kinds = set()
    for step in range(3):
        rng = np.random.default_rng([step, group.rank])
        with store.step(weight=group.rank + 1):
            for name in store.units:
                with store.unit(name) as w:
                    kinds |= {type(leaf).__name__ for leaf in w.values()}
            for name in reversed(store.units):
                with store.unit(name) as w:
                    store.reduce(
                        name, {leaf: convert(rng.standard_normal(tuple(v.shape)).astype(dtype)) for leaf, v in w.items()}
                    )
        del w
        store.update(adam)
    held = {purpose: nbytes for purpose, nbytes in store.memory.held.items() if purpose in ("parameters", "state")}
    full = store.full()
    kinds |= {type(leaf).__name__ for unit in full.values() for leaf in unit.values()}
    return [np.asarray(leaf).tobytes() for unit in full.values() for leaf in unit.values()], kinds, held


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_bits_do_not_depend_on_the_backend(backend):
    found = [
        must(thread_world(lambda group: trained(group, np.asarray, "full", mp.Adam(0.1)), 3, name))[0]
        for name in ("simulated", backend)
    ]
    assert found[0] == found[1]


@pytest.mark.peers
@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("strategy", ["full", "grad", "none"])
def test_the_arrays_of_others_give_the_same_bits(library, strategy):
    """Plain SGD, which is the same operations in all libraries; the buffers of JAX are NumPy's."""
    if library == "torch":
        import torch

        convert, kind = torch.tensor, "Tensor"
    else:
        import jax.numpy as jnp

        convert, kind = jnp.asarray, "ArrayImpl"
    optimizer = mp.SGD(0.1, momentum=0.9)
    expected = must(thread_world(lambda group: trained(group, np.asarray, strategy, optimizer), 2, "simulated"))
    found = must(thread_world(lambda group: trained(group, convert, strategy, optimizer), 2, "simulated"))
    for (bits, _, held), (its_bits, kinds, its_held) in zip(expected, found, strict=True):
        assert its_bits == bits
        assert kinds == {kind}
        assert its_held == held


@pytest.mark.peers
def test_a_torch_module_is_trained_by_hand():
    """Forward and backward pass by torch.autograd, unit by unit: only one unit is whole at a time."""
    import torch

    torch.manual_seed(0)
    xs, ys = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()

    def program(group):
        store = mp.Sharded(dict(model.named_parameters()), group, units=["0", "2"])
        x, y = xs[group.rank :: 2], ys[group.rank :: 2]
        for _ in range(3):
            with store.step(weight=len(x)):
                with store.unit("0") as w:
                    hidden = torch.tanh(torch.nn.functional.linear(x, w["weight"], w["bias"]))
                with store.unit("2") as w:
                    leaves = {name: leaf.requires_grad_() for name, leaf in w.items()}
                    h = hidden.requires_grad_()
                    loss = ((torch.nn.functional.linear(h, leaves["weight"], leaves["bias"]) - y) ** 2).mean()
                    *gradients, dh = torch.autograd.grad(loss, [*leaves.values(), h])
                    store.reduce("2", dict(zip(leaves, gradients, strict=True)))
                with store.unit("0") as w:
                    leaves = {name: leaf.requires_grad_() for name, leaf in w.items()}
                    out = torch.tanh(torch.nn.functional.linear(x, leaves["weight"], leaves["bias"]))
                    gradients = torch.autograd.grad(out, list(leaves.values()), dh)
                    store.reduce("0", dict(zip(leaves, gradients, strict=True)))
            store.update(mp.Adam(0.1))
        return {name: value.numpy() for name, value in store.full().items()}

    found = must(thread_world(program, 2, "simulated"))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ((model(xs) - ys) ** 2).mean().backward()
        optimizer.step()
    for name, value in model.named_parameters():
        for each in found:
            np.testing.assert_allclose(each[name], value.detach().numpy(), rtol=1e-10)


@pytest.mark.peers
def test_bfloat16_of_torch_is_gathered_and_reduced():
    import torch

    def program(group):
        store = mp.Sharded(
            {"w": torch.arange(6, dtype=torch.float32)}, group, compute_dtype="bfloat16", reduce_dtype="bfloat16"
        )
        with store.step(), store.unit("w") as w:
            seen = w.dtype
            store.reduce("w", torch.ones_like(w))
        store.update(mp.SGD(1.0))
        return seen, store.full()["w"].tolist()

    assert must(thread_world(program, 2, "simulated")) == [(torch.bfloat16, [-1.0, 0, 1, 2, 3, 4])] * 2


@pytest.mark.peers
def test_the_tied_tensors_of_a_state_dict_are_one_parameter():
    import torch

    def program(group):
        module = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3, bias=False)})
        module["head"].weight = module["embedding"].weight
        module["head"].weight.data.zero_()
        store = mp.Sharded(module.state_dict(), group)
        with store.step():
            for unit in store.units:
                store.reduce(unit, {"weight": torch.ones(3, 2)})
        store.update(mp.SGD(1.0))
        expanded = torch.zeros(1).expand(4)  # repeats an element, and is a value
        assert mp.Sharded({"a": expanded, "b": expanded}, group).full()["b"].tolist() == [0.0] * 4
        with pytest.raises(UsageError, match="share memory but are not the same array"):
            mp.Sharded({"a": module["head"].weight, "b": module["head"].weight.T}, group)
        return [each.unique().tolist() for each in store.full().values()]

    assert must(thread_world(program, 2, "simulated")) == [[[-2.0], [-2.0]]] * 2


@pytest.mark.peers
@pytest.mark.parametrize("strategy", ["full", 1, 2])
def test_the_gradient_of_a_tied_parameter_of_torch_counts_once_and_those_of_jax_add_up(strategy):
    import jax
    import torch

    def trained(params, gradients, group):
        if strategy == "full":
            opt = mp.Sharded(params, group, units=[""])
            with opt.step():
                opt.reduce("", gradients)
            opt.update(mp.SGD(1.0))
        else:
            opt = mp.ShardedOptimizer(mp.SGD(1.0), params, group, strategy)
            opt.step(gradients)
        return opt.full()

    def program(group):
        module = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "ab"})
        module["b"].weight = module["a"].weight
        module["a"].weight.data.zero_()
        both = module["a"].weight + module["b"].weight
        (both * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
        named = dict(module.named_parameters(remove_duplicate=False))
        tied = trained(named, {name: each.grad for name, each in named.items()}, group)["b.weight"]
        # An expanded gradient is the sum as well.
        (expanded,) = torch.autograd.grad(module["a"].weight.sum() * 3, [module["a"].weight])
        spread = trained(named, dict.fromkeys(named, expanded), group)["b.weight"]
        # The gradients of a tree of JAX are those of its places, and may be one object; params are tied by NumPy here.
        w = np.zeros(2, "f4")
        partial = jax.grad(lambda p: ((p["a"] + p["b"] + 1) ** 2).sum())({"a": w, "b": w})
        values = trained({"a": w, "b": w}, partial, group)["a"]
        same = trained({"a": w, "b": w}, {"a": partial["a"], "b": partial["a"]}, group)["a"]
        return tied.tolist(), spread.tolist(), values.tolist(), same.tolist()

    found = ([[-2.0, -4.0], [-6.0, -8.0]], [[-3.0] * 2] * 2, [-4.0] * 2, [-4.0] * 2)
    assert must(thread_world(program, 2, "simulated")) == [found] * 2


@pytest.mark.peers
def test_a_refused_parameter_names_the_class():
    import torch

    def program(group):
        with pytest.raises(LayoutError, match="ShardedOptimizer cannot take a, which is on the device meta"):
            mp.ShardedOptimizer(mp.SGD(1.0), {"a": torch.ones(2, device="meta")}, group)
        return True

    assert must(thread_world(program, 2, "simulated")) == [True] * 2
