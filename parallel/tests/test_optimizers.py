"""The optimizers against their definitions in float64, and against those of torch."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import oneaccord_parallel as mp
from oneaccord.errors import UsageError


def reference(optimizer, param, gradients):
    """One number, in Python's floats, as the papers and torch.optim define it."""
    momentum = mean = square = 0.0
    for step, given in enumerate(gradients, 1):
        gradient = given
        if isinstance(optimizer, mp.SGD):
            gradient += optimizer.weight_decay * param
            momentum = optimizer.momentum * momentum + gradient
            if optimizer.momentum:
                gradient = gradient + optimizer.momentum * momentum if optimizer.nesterov else momentum
            param -= optimizer.lr * gradient
            continue
        if isinstance(optimizer, mp.AdamW):
            param -= optimizer.lr * optimizer.weight_decay * param
        else:
            gradient += optimizer.weight_decay * param
        first, second = optimizer.betas
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        root = math.sqrt(square / (1 - second**step))
        param -= optimizer.lr * mean / (1 - first**step) / (root + optimizer.eps)
    return param


OPTIMIZERS = [
    mp.SGD(0.1),
    mp.SGD(0.1, momentum=0.9, weight_decay=0.01),
    mp.SGD(0.1, momentum=0.9, nesterov=True),
    mp.Adam(0.01),
    mp.Adam(0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
    mp.AdamW(0.01, weight_decay=0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_the_definitions_in_float64(optimizer, library):
    rng = np.random.default_rng(0)
    param, gradients = rng.standard_normal(7), rng.standard_normal((5, 7))
    expected = [reference(optimizer, p, g) for p, g in zip(param.tolist(), gradients.T.tolist(), strict=True)]
    before, state = gradients, {}
    param, gradients = library.give([param.copy(), gradients.copy()])
    for gradient in gradients:
        optimizer(param, gradient, state)
    np.testing.assert_allclose(library.take(param), expected, rtol=1e-13)
    assert (library.take(gradients) == before).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_how_a_parameter_is_divided(optimizer, dtype, library):
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    rng = np.random.default_rng(1)
    whole = rng.standard_normal(20_000).astype(kind)
    other, other_state = library.give(whole.copy()), {}
    parts = [part.copy() for part in np.split(whole, [1, 14_001])]
    table = whole.reshape(50, 400).copy()
    states = [{} for _ in range(5)]
    for _ in range(3):
        gradient = rng.standard_normal(whole.size).astype(kind)
        optimizer(whole, gradient, states[0])
        optimizer(other, library.give(gradient), other_state)
        optimizer(table, gradient.reshape(table.shape), states[1])
        for part, piece, state in zip(parts, np.split(gradient, [1, 14_001]), states[2:], strict=True):
            optimizer(part, piece, state)
    assert whole.dtype == kind
    assert whole.tobytes() == other.tobytes() == table.tobytes() == np.concatenate(parts).tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_prepare_makes_the_state_of_a_first_call(optimizer):
    prepared, called, param = {}, {}, np.ones(3, np.float32)
    optimizer.prepare(param, prepared)
    optimizer(param, param, called)
    assert {key: (value.shape, value.dtype) for key, value in prepared.items()} == {
        key: (value.shape, value.dtype) for key, value in called.items()
    }
    assert not any(value.any() for value in prepared.values())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mp.SGD(-1.0), "lr must be 0 or more, not -1.0"),
        (lambda: mp.SGD(nesterov=True), "nesterov=True needs a momentum"),
        (lambda: mp.Adam(eps=math.nan), "eps must be 0 or more, not nan"),
        (lambda: mp.AdamW(betas=(0.9, 1.0)), "from 0 to below 1"),
    ],
)
def test_impossible_settings_are_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()


@pytest.mark.peers
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_torch_takes_the_same_steps(optimizer):
    """Each step adds at most 1 ulp of the largest number: torch fuses some multiplications and additions."""
    import torch

    kinds = {mp.SGD: torch.optim.SGD, mp.Adam: torch.optim.Adam, mp.AdamW: torch.optim.AdamW}
    rng = np.random.default_rng(2)
    ours, state = rng.standard_normal(50_001).astype(np.float32), {}
    theirs = torch.tensor(ours, requires_grad=True)
    tensor, its_state = torch.tensor(ours), {}
    peer = kinds[type(optimizer)]([theirs], **vars(optimizer))
    for step in range(20):
        gradient = rng.standard_normal(ours.size).astype(np.float32)
        optimizer(ours, gradient, state)
        optimizer(tensor, torch.tensor(gradient), its_state)
        theirs.grad = torch.tensor(gradient)
        peer.step()
        ulp = np.spacing(np.abs(ours).max())
        for other in (theirs.detach().numpy(), tensor.numpy()):
            assert np.abs(ours - other).max() <= ulp * (step + 1)
