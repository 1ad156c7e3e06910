"""Stages of torch and JAX: their gradients are those of one process."""

from __future__ import annotations

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord_parallel as mp
from oneaccord.errors import UsageError

pytestmark = pytest.mark.peers

NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]


def plan_of(name):
    """Return a plan of four stages in all."""
    return mp.schedule(name, 2, 4) if name == "interleaved_1f1b" else mp.schedule(name, 4, 4)


def train(group, plan, stages, x, y, loss):
    numbers = plan.stages_of(group.rank)
    pipeline = mp.Pipeline(group, [stages[number] for number in numbers], plan)
    value, gradients = pipeline.step(x, y, loss=loss)
    assert pipeline.most_held == plan.peak()[group.rank]
    return value, dict(zip(numbers, gradients, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_of_torch(name, dtype):
    import torch

    torch.set_num_threads(1)

    class Embed(torch.nn.Module):
        """Numbers to vectors; with a parameter that is not used, and one that needs no gradient."""

        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(10, 6)
            self.unused = torch.nn.Parameter(torch.ones(2))
            self.frozen = torch.nn.Parameter(torch.ones(6), requires_grad=False)

        def forward(self, tokens):
            return self.table(tokens) * self.frozen, tokens > 3

    class Masked(torch.nn.Module):
        """A layer of which the mask chooses the rows that change."""

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)

        def forward(self, both):
            x, mask = both
            return torch.where(mask[:, None], torch.tanh(self.linear(x)), x), mask

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 1)

        def forward(self, both):
            return self.linear(both[0])[:, 0]

    torch.manual_seed(0)
    modules = [each.to(getattr(torch, dtype)) for each in (Embed(), Masked(), Masked(), Head())]
    x, y = torch.arange(12) % 10, torch.linspace(-1, 1, 12).to(getattr(torch, dtype))
    loss = torch.nn.functional.mse_loss
    plan = plan_of(name)
    stages = [mp.torch.Stage(module) for module in modules]
    results = must(thread_world(lambda group: train(group, plan, stages, x, y, loss), plan.stages, "simulated"))

    whole = torch.nn.Sequential(*modules)
    sums, total = {}, 0.0
    for inputs, targets in zip(x.chunk(4), y.chunk(4), strict=True):
        value = loss(whole(inputs), targets)
        total += value.item()
        wanted = {key: each for key, each in whole.named_parameters() if each.requires_grad}
        gradients = torch.autograd.grad(value, list(wanted.values()), allow_unused=True, materialize_grads=True)
        for key, each in zip(wanted, gradients, strict=True):
            sums[key] = sums[key] + each if key in sums else each.float()
    assert [value for value, _ in results] == [total / 4] * plan.stages
    found = {f"{number}.{key}": each for _, some in results for number, tree in some.items() for key, each in tree.items()}
    assert found.keys() == sums.keys()
    for key, each in found.items():
        assert torch.equal(each, (sums[key] / 4).to(each.dtype)), key
        assert each.dtype == getattr(torch, dtype)


def test_an_evaluation_of_torch_and_jax_has_the_loss_of_a_step_and_no_graph():
    import jax.numpy as jnp
    import torch

    torch.manual_seed(0)
    modules = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)]
    weights = [np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3), np.ones((3, 1), np.float32)]
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    plan = mp.schedule("1f1b", 2, 2)

    def program(group):
        for stage, given, mean in (
            (mp.torch.Stage(modules[group.rank]), torch.from_numpy(x), lambda y, _: (y**2).mean()),
            (
                mp.jax.Stage(lambda w, x: jnp.tanh(x @ w), jnp.asarray(weights[group.rank])),
                jnp.asarray(x),
                lambda y, _: (y**2).mean(),
            ),
        ):
            pipeline = mp.Pipeline(group, [stage], plan)
            assert pipeline.eval(given, loss=mean)[0] == pipeline.step(given, loss=mean)[0]
            outputs = pipeline.eval(given)[1]
            if outputs is not None:
                assert [each.shape for each in outputs] == [(2, 1), (2, 1)]
                assert not getattr(outputs[0], "requires_grad", False)
        return True

    assert must(thread_world(program, 2, "simulated")) == [True] * 2


@pytest.mark.parametrize("name", NAMES)
def test_functions_of_jax(name):
    import jax
    import jax.numpy as jnp

    def embed(params, tokens):
        return params["table"][tokens], tokens > 3

    def middle(params, both):
        x, mask = both
        return jnp.where(mask[:, None], jnp.tanh(x @ params["w"] + params["b"]), x), mask

    def head(params, both):
        return (both[0] @ params["w"])[:, 0]

    rng = np.random.default_rng(1)

    def normal(*shape):
        return jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) / 4

    functions = [embed, middle, middle, head]
    params = [{"table": normal(10, 6)}, *({"w": normal(6, 6), "b": normal(6)} for _ in range(2)), {"w": normal(6, 1)}]
    x, y = jnp.arange(12) % 10, jnp.linspace(-1, 1, 12)

    def loss(output, target):
        return ((output - target) ** 2).mean()

    plan = plan_of(name)
    stages = [mp.jax.Stage(function, each) for function, each in zip(functions, params, strict=True)]
    results = must(thread_world(lambda group: train(group, plan, stages, x, y, loss), plan.stages, "simulated"))

    def whole(params, inputs, targets):
        for function, each in zip(functions, params, strict=True):
            inputs = function(each, inputs)
        return loss(inputs, targets)

    parts = list(zip(jnp.split(x, 4), jnp.split(y, 4), strict=True))
    total = sum(float(whole(params, *part)) for part in parts) / 4
    expected = jax.tree.map(lambda *each: sum(each) / 4, *(jax.grad(whole)(params, *part) for part in parts))
    assert [value for value, _ in results] == [total] * plan.stages
    found = {number: tree for _, some in results for number, tree in some.items()}
    for number, tree in enumerate(expected):
        for key, each in tree.items():
            assert isinstance(found[number][key], jax.Array)
            np.testing.assert_allclose(found[number][key], each, rtol=1e-5, atol=1e-6)


def test_stages_of_different_libraries_meet():
    import torch

    w = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    first = mp.Stage(lambda x: (x @ w, x), lambda x, dy: (None, {"w": x.T @ dy}))
    second = mp.torch.Stage(torch.nn.Linear(3, 1))
    with torch.no_grad():  # so that no sum is rounded
        second.module.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    plan = mp.schedule("1f1b", 2, 2)
    results = must(thread_world(lambda g: train(g, plan, [first, second], x, None, lambda out, _: out.sum()), 2, "simulated"))
    weight = second.module.weight.detach().numpy()
    np.testing.assert_allclose(results[0][1][0]["w"], x.T @ np.repeat(weight, 4, 0) / 2)
    assert isinstance(results[0][1][0]["w"], np.ndarray)
    assert isinstance(results[1][1][1]["weight"], torch.Tensor)


def test_an_evaluation_takes_metrics_without_a_derivative_and_makes_no_gradient():
    import jax.numpy as jnp
    import torch

    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert not ctx.needs_input_grad[0]
            return x.sum()

    x, y = np.eye(4, 2, dtype="f4"), np.array([0, 0, 0, 1])
    plan = mp.schedule("1f1b", 1, 2)

    def program(group):
        module = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.eye_(module.weight)
        pipeline = mp.Pipeline(group, [mp.torch.Stage(module)], plan)
        metrics = [
            lambda out, y: (out.argmax(1) == y).float().mean(),
            lambda out, y: (out.argmax(1) == y).sum(),
            lambda out, y: int(out.sum()),
            lambda out, y: NoBackward.apply(out),
        ]
        found = [pipeline.eval(torch.from_numpy(x), torch.from_numpy(y), loss=metric)[0] for metric in metrics]
        pipeline = mp.Pipeline(group, [mp.jax.Stage(lambda w, x: x @ w, jnp.eye(2))], plan)
        metrics = [
            lambda out, y: (out.argmax(1) == y).mean(),
            lambda out, y: (out.argmax(1) == y).sum(),
            lambda out, y: int(out.sum()),
        ]
        return found + [pipeline.eval(jnp.asarray(x), jnp.asarray(y), loss=metric)[0] for metric in metrics]

    # Right are the first microbatch's first row, and the second one's.
    assert must(thread_world(program, 1, "simulated")) == [[0.5, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0]]
    with pytest.raises(UsageError, match=r"loss returned tensor(?s:.*); expected a number"):
        must(
            thread_world(
                lambda g: mp.Pipeline(g, [mp.torch.Stage(torch.nn.Linear(2, 2))], plan).eval(x, loss=lambda out, _: out),
                1,
                "simulated",
            )
        )


def test_the_loss_of_a_module_is_a_tensor():
    import torch

    stage = mp.torch.Stage(torch.nn.Linear(3, 1))
    plan = mp.schedule("1f1b", 1, 2)
    with pytest.raises(UsageError, match="loss returned a float; expected a tensor of one element"):
        must(thread_world(lambda g: train(g, plan, [stage], np.ones((2, 3), "f4"), None, lambda out, _: 1.5), 1, "simulated"))
