"""torch's modules with batch normalisation over all ranks are those of one process with the batches of all of them."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest

import oneaccord_parallel as mp
from oneaccord.errors import UsageError
from oneaccord_simulated import run

pytestmark = pytest.mark.peers

ROWS = [3, 0, 5, 1]


def model_of(torch, bias=True):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6),
        torch.nn.BatchNorm1d(6),
        torch.nn.ReLU(inplace=True),
        torch.nn.Sequential(torch.nn.Unflatten(1, (3, 2)), torch.nn.BatchNorm1d(3, momentum=None), torch.nn.Flatten()),
        torch.nn.BatchNorm1d(6, affine=False, track_running_stats=False),
        torch.nn.Linear(6, 2),
    ).double()


def test_a_model_learns_what_one_process_learns_from_unequal_batches():
    import torch

    x = torch.from_numpy(np.random.default_rng(0).normal(size=(sum(ROWS), 4)))
    alone = model_of(torch)
    for _ in range(2):
        loss = (alone(x) ** 3).sum(1).mean()
    loss.backward()

    def program(group):
        model = model_of(torch)
        parameters = list(model.parameters())
        model = mp.torch.convert_sync_batchnorm(model, group)
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        mine = x.split(ROWS)[group.rank]
        for module in model.modules():
            if isinstance(module, mp.torch.SyncBatchNorm):
                module.loss_weight = len(mine)
        for _ in range(2):
            losses = (model(mine) ** 3).sum(1)
        (losses.mean() if len(mine) else losses.sum()).backward()
        for parameter in parameters:
            group.all_reduce(parameter.grad * len(mine), out=parameter.grad)
            parameter.grad /= sum(ROWS)
        model.eval()
        return [parameter.grad for parameter in parameters], model.state_dict(), model(x)

    done = run(program, 4)
    alone.eval()
    for grads, state, y in done.results:
        for grad, parameter in zip(grads, alone.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-9, atol=1e-12)
        assert list(state) == list(alone.state_dict())
        for ours, other in zip(state.values(), alone.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(y, alone(x), rtol=1e-10, atol=1e-12)
    operations = [call.operation for call in done.trace.calls_of(0)]
    assert operations[:9] == ["all_gather"] * 6 + ["all_reduce"] * 3  # and then those of the gradients, and none in evaluation
    assert len(operations) == 9 + len(list(alone.parameters()))


@pytest.mark.parametrize("rows", [[3, 4, 1], [5, 0, 2]])
def test_data_parallel_weighs_the_normalised_batches_as_the_gradients(rows):
    import torch

    x = torch.from_numpy(np.random.default_rng(1).normal(size=(3, sum(rows), 4)))
    alone, found = model_of(torch), []
    for batch in x:
        alone.zero_grad()
        (alone(batch) ** 3).sum(1).mean().backward()
        found.append([parameter.grad.clone() for parameter in alone.parameters()])

    def program(group):
        model = mp.torch.convert_sync_batchnorm(model_of(torch), group)
        sync = mp.torch.data_parallel(model, group)
        layers = [module for module in model.modules() if isinstance(module, mp.torch.SyncBatchNorm)]
        count = rows[group.rank]
        for batch, expected in zip(x, found, strict=True):
            model.zero_grad()
            with sync.step(weight=count):
                assert [layer.loss_weight for layer in layers] == [count] * 3
                losses = (model(batch.split(rows)[group.rank]) ** 3).sum(1)
                (losses.mean() if count else losses.sum()).backward()
            assert [layer.loss_weight for layer in layers] == [1.0] * 3
            for parameter, grad in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-12)
        with pytest.raises(ZeroDivisionError), sync.step(weight=count):
            raise ZeroDivisionError
        assert [layer.loss_weight for layer in layers] == [1.0] * 3
        return {name: value.numpy() for name, value in model.state_dict().items()}

    for state in run(program, 3).results:
        for name, value in alone.state_dict().items():
            np.testing.assert_allclose(state[name], value, rtol=1e-12, atol=1e-14)


def test_a_copy_of_a_module_shares_its_group_and_nothing_else():
    import torch

    def program(group):
        module = mp.torch.SyncBatchNorm(3, group)
        other = copy.deepcopy(torch.nn.Sequential(module))[0]
        other(torch.ones(2, 3))
        assert other.group is group
        return module.num_batches_tracked.item(), other.num_batches_tracked.item(), isinstance(other.weight, torch.nn.Parameter)

    assert run(program, 2).results == [(0, 1, True)] * 2


def test_what_was_written_to_since_the_forward_pass_is_an_error():
    import torch

    def program(group):
        x = torch.ones(2, 3).requires_grad_() * 2
        y = mp.torch.SyncBatchNorm(3, group)(x)
        with pytest.raises(UsageError, match=r"shape \(n, channels, ...\), but this one has shape \(2,\)"):
            mp.torch.SyncBatchNorm(2, group)(torch.ones(2))
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    run(program, 1)


def test_two_passes_forward_may_come_before_two_backward():
    """As for a discriminator that sees two batches; also on the ranks that get their statistics from rank 0."""
    import torch

    def program(group):
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        mp.torch.data_parallel(net, group)
        x = torch.arange(6.0).reshape(3, 2) + group.rank
        one, two = net(x).square().mean(), net(-x).mean()
        one.backward()
        two.backward()
        return [each.tolist() for each in net.buffers()]

    results = run(program, 2).results
    assert results[0] == results[1]


def test_a_layer_from_a_file_needs_a_group_to_train():
    import torch

    def program(group):
        net = mp.torch.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(2)), group)
        mp.torch.data_parallel(net, group)
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        x = torch.arange(6.0).reshape(3, 2) + group.rank
        assert torch.equal(loaded.eval()(x), net.eval()(x))
        net.train()
        with pytest.raises(UsageError, match="convert_sync_batchnorm"):
            loaded.train()(x)
        return torch.equal(mp.torch.convert_sync_batchnorm(loaded, group)(x), net(x))

    assert run(program, 2).results == [True, True]
