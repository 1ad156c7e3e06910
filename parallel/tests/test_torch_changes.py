"""Wrapped modules of torch that are changed, shared, copied, or go forward twice. `make test-peers` runs it."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np
import pytest
from support.gradient_oracles import mean, same_bits

import oneaccord_parallel as mp
from oneaccord.errors import LayoutError, UnsupportedError, UsageError

pytestmark = pytest.mark.peers


def data(rank, step=0):
    import torch

    return torch.from_numpy(np.random.default_rng((rank, step)).standard_normal((rank + 2, 6)).astype("f4"))


def grads(module):
    return {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}


def test_a_parameter_that_is_unfrozen_later_is_refused(world):
    def program(group):
        from torch import nn, ones

        module = nn.Linear(2, 1)
        module.bias.requires_grad_(False)
        mp.torch.data_parallel(module, group)
        module.bias.requires_grad_(True)
        with pytest.raises(UsageError, match="bias had no gradients when data_parallel was called, and have now"):
            module(ones(3, 2)).sum().backward()

    world(2).run(program)


def test_no_hook_sees_a_bucket_before_its_sums_are_whole(world):
    def program(group):
        import torch

        module = torch.nn.Linear(3, 1)
        sync = mp.torch.data_parallel(module, group, first_bucket_bytes=1)
        seen = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad))
        for _ in range(2):  # then .grad is a view of a bucket at first
            with sync.step():
                module(torch.full((1, 3), float(group.rank))).sum().backward()
                seen += [each.grad for each in module.parameters()]
        return seen, module.weight.grad.tolist()

    # 0.5, the mean; on top of that each rank's own
    assert world(2).run(program).results == [([None] * 8, [[1.0] * 3])] * 2


def test_a_parameter_has_one_owner_on_every_rank(world):
    def program(group, also):
        from torch import nn, ones

        shared = nn.Linear(3, 1)
        one, two = nn.Sequential(shared), nn.ModuleDict({"body": shared, "head": nn.Linear(1, 1)})
        first = mp.torch.data_parallel(one, group)
        if group.rank not in also:
            first.remove()
        with pytest.raises(UsageError, match=r"body\.weight") as told:
            mp.torch.data_parallel(two, group)
        first.remove()
        with pytest.raises(UsageError, match=r"taken out of its module by remove\(\)"), first.step():
            pass
        both = nn.ModuleList([one, two])
        second = mp.torch.data_parallel(both, group)
        mp.torch.data_parallel(both, group)  # takes the place of the one before
        with pytest.raises(UsageError, match=r"taken out of its module by remove\(\)"), second.step():
            pass
        (shared(ones(1, 3)).sum() * (group.rank + 1)).backward()
        assert shared.weight.grad.tolist() == [[1.5] * 3]
        return str(told.value)

    for text in world(2).run(program, (0, 1)).results:
        assert "body.weight is averaged by the data_parallel of another module, a Sequential already: give one module" in text
    for text in world(2).run(program, (1,)).results:
        assert "missing on rank 0; averaged by the data_parallel of another module, a Sequential on rank 1" in text


def test_a_module_is_wrapped_again_once_its_group_is_of_no_use(world):
    def program(group, module):
        from torch import ones

        again = mp.torch.data_parallel(module, group)
        with again.step():
            module(ones(1, 2)).sum().backward()
        return module.weight.grad.tolist()

    from torch import nn

    module = nn.Linear(2, 1)
    for _ in range(2):
        module.zero_grad()
        assert world(1).run(program, module).results == [[[1.0, 1.0]]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("assign", "0.weight, 0.bias, 2.weight, 2.bias"),
        ("data", "0.weight was torch.float32 on cpu"),
        ("head", "2.weight, 2.bias"),
        ("more", "3.weight"),
        ("norm", "0.parametrizations.weight.original0, 0.parametrizations.weight.original1"),
        ("thaw", "0.bias had no gradients"),
        ("removed", "parameters were taken out of the module"),
    ],
)
@pytest.mark.parametrize("within", ["whole", "children", "block"])
def test_parameters_that_come_later_are_refused_on_every_rank(world, change, named, within):
    def program(group):
        import torch
        from torch import nn

        module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        module[0].bias.requires_grad_(change != "thaw")
        sync = mp.torch.data_parallel(nn.ModuleList([module]) if within == "children" else module, group)
        if change == "assign":
            module.load_state_dict({name: each.clone() for name, each in module.state_dict().items()}, assign=True)
        elif change == "data":
            module.double()
        elif change == "head":
            module[2] = nn.Linear(3, 2)
        elif change == "more":
            module.append(nn.Linear(1, 1, bias=False))
        elif change == "removed":
            del module[2]
        elif change == "norm":
            nn.utils.parametrizations.weight_norm(module[0])
        else:
            module.requires_grad_(False)
            module[0].bias.requires_grad_(True)
        x = torch.ones(2, 2, dtype=module[0].bias.dtype)
        with torch.no_grad():
            assert module(x).isfinite().all()
        begin = sync.step().__enter__ if within == "block" else partial(module, x)
        with pytest.raises(UsageError, match="Begin again") as told:
            begin()
        mp.torch.data_parallel(sync.module, group)  # takes the place of the one before
        module(x + group.rank).square().mean().backward()
        same = [group.all_gather(each.grad.reshape(1, -1)) for each in module.parameters() if each.requires_grad]
        assert all((each[0] == each[1]).all() for each in same)
        return str(told.value)

    for text in world(2).run(program).results:
        assert all(each in text for each in named.split(", "))


def test_modules_that_change_without_new_parameters_go_on(world):
    def program(group):
        from torch import nn, ones

        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        mp.torch.data_parallel(module, group)
        mp.torch.convert_sync_batchnorm(module, group)
        module[2].requires_grad_(False)
        module.append(nn.Dropout(0))
        module.append(nn.Linear(1, 1).requires_grad_(False))
        module(ones(2, 2) * (group.rank + 1)).sum().backward()
        return module[0].weight.grad.tolist(), module[2].weight.grad

    first, second = world(2).run(program).results
    assert first == second
    assert first[1] is None


def test_a_graph_of_gradients_is_refused(world):
    def program(group):
        import torch

        module = torch.nn.Linear(2, 1, bias=False)
        mp.torch.data_parallel(module, group)
        with pytest.raises(UnsupportedError, match="a graph of its own"):
            module(torch.ones(1, 2)).square().sum().backward(create_graph=True)

    world(2).run(program)


@pytest.mark.parametrize("sync_batch_norm", [False, True])
def test_copies_of_a_module_are_plain(world, sync_batch_norm):
    def program(group):
        import copy
        import io

        import torch
        from torch import nn

        module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        if sync_batch_norm:
            mp.torch.convert_sync_batchnorm(module, group)
        sync = mp.torch.data_parallel(module, group)
        with sync.step():
            module(data(group.rank)).square().mean().backward()
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        copies = [
            copy.deepcopy(module),
            torch.optim.swa_utils.AveragedModel(module).module,
            torch.load(file, weights_only=False),
        ]
        before = grads(module)
        for each in copies:
            assert all(
                torch.equal(one, other)
                for one, other in zip(module.state_dict().values(), each.state_dict().values(), strict=True)
            )
            each.eval()
            each(data(group.rank)).square().mean().backward()
        assert all(same_bits(before[name], value) for name, value in grads(module).items())
        own = [each[2].bias.grad.tolist() for each in copies]
        if sync_batch_norm:
            assert copies[0][1].group is group
            with pytest.raises(UsageError, match="loaded from a file"):
                copies[2].train()(data(group.rank))
            copies[2][1].group = group
            assert copies[2](data(group.rank)).isfinite().all()
        return own

    first, second = world(2).run(program).results
    assert first[0] == first[1] == first[2]
    assert first != second


def test_two_forward_and_two_backward_passes_with_batch_norm(world):
    def program(group):
        from torch import nn

        module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        sync = mp.torch.data_parallel(module, group)
        plain = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        plain.load_state_dict(module.state_dict())
        found = []
        for net in (module, plain):
            real, fake = net(data(group.rank)).mean(), net(data(group.rank, 1)).square().mean()
            real.backward()
            found.append(grads(net))
            net.zero_grad()
            fake.backward()
            found.append(grads(net))
        for mean_of_both, own in zip(found[:2], found[2:], strict=True):
            for name, value in own.items():
                assert same_bits(mean_of_both[name], mean(list(group.all_gather(value[None])), [1, 1])), name
        sync.remove()
        return module[1].running_mean.tolist()

    first, second = world(2).run(program).results
    assert first == second


def test_a_buffer_that_a_graph_needs_is_not_changed_unseen(world):
    def program(group):
        import torch

        module = torch.nn.Linear(1, 1, bias=False)
        module.register_buffer("scale", torch.ones(1))
        mp.torch.data_parallel(module, group)
        losses = [(module(torch.ones(1, 1)) * module.scale).sum() for _ in range(3)]
        losses[0].backward()
        losses[1].backward()  # the buffer was the same on all ranks
        module.scale = torch.ones(1) * (group.rank + 1)
        losses = [(module(torch.ones(1, 1)) * module.scale).sum() for _ in range(2)]
        losses[0].backward()
        with pytest.raises(RuntimeError, match="modified by an inplace") if group.rank else contextlib.nullcontext():
            losses[1].backward()

    world(2).run(program, check=False)


def test_buffers_that_torch_does_not_write_to_get_rank_0s_values(world):
    def program(group):
        import torch

        module, own = torch.nn.Linear(1, 1), float(group.rank + 1)
        module.register_buffer("expanded", torch.full((1,), own).expand(3))
        module.register_buffer("conjugate", torch.tensor([own + own * 1j]).conj())
        with torch.inference_mode():
            module.register_buffer("inference", torch.full((2,), own))
        module.tied = torch.nn.Identity()
        module.tied.register_buffer("again", module.expanded)
        mp.torch.data_parallel(module, group)
        assert module.tied.again is module.expanded
        found = [each.tolist() for each in module.buffers()]
        if group.rank == 0:
            module.expanded = module.tied.again = torch.full((1,), 5.0).expand(3)
        module(torch.ones(1, 1)).sum().backward()
        return found, module.expanded.tolist()

    assert world(2).run(program).results == [([[1.0] * 3, [1 - 1j], [1.0] * 2], [5.0] * 3)] * 2


ODD = {
    "sparse": "a tensor of the layout torch.sparse_coo: use x.to_dense()",
    "meta": "on the device meta, where it holds no data",
    "lazy": "not initialised yet: run a batch through the module first",
    "quantized": "a quantized tensor, whose scale would be lost: use x.dequantize()",
    "nested": "a Tensor, which holds other tensors",
}


@pytest.mark.filterwarnings("ignore:.*(quantize|nested tensors).*:UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_cannot_travel_are_refused_on_every_rank(world, kind):
    def odd():
        import torch

        return {
            "sparse": lambda: torch.eye(2).to_sparse(),
            "meta": lambda: torch.ones(2, 2, device="meta"),
            "lazy": torch.nn.UninitializedBuffer,
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.quint8),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
        }[kind]()

    def program(group):
        import torch

        tensor = odd()
        module = torch.nn.Linear(1, 1)
        before = module.weight.tolist()
        for each in (tensor, tensor if group.rank == 0 else torch.ones(2, 2)):
            module.register_buffer("odd", each)
            with pytest.raises((LayoutError, UsageError)) as told:
                mp.torch.data_parallel(module, group)
            assert ODD[kind] in str(told.value)
            with pytest.raises((LayoutError, UsageError)) as told:
                mp.broadcast({"odd": each}, group)
            assert ODD[kind] in str(told.value)
            assert module.weight.tolist() == before
            module(torch.ones(1, 1)).sum().backward()  # without hooks
        return group.all_reduce(1)

    assert world(2).run(program).results == [2, 2]


def test_a_parameter_whose_elements_share_memory_is_refused_on_every_rank(world):
    def program(group):
        import torch

        for every in (True, False):
            module = torch.nn.Linear(1, 1)
            bias = torch.ones(1).expand(3) if every or group.rank == 1 else torch.ones(3)
            module.more = torch.nn.Parameter(bias)
            with pytest.raises(UsageError, match=r"more.*share memory"):
                mp.torch.data_parallel(module, group)
        return group.all_reduce(1)

    assert world(2).run(program).results == [2, 2]


def test_frozen_parameters_that_torch_does_not_write_to_get_rank_0s_values(world):
    def program(group):
        import torch

        module, own = torch.nn.Linear(1, 1), float(group.rank + 1)
        module.expanded = torch.nn.Parameter(torch.full((1,), own).expand(3), requires_grad=False)
        with torch.inference_mode():
            module.inference = torch.nn.Parameter(torch.full((2,), own), requires_grad=False)
        module.tied = torch.nn.Identity()
        module.tied.again = module.expanded
        mp.torch.data_parallel(module, group)
        assert module.tied.again is module.expanded
        for _ in range(2):
            module.zero_grad()
            (module(torch.ones(1, 1)) * own).sum().backward()
        kinds = {type(each) for each in module.parameters()}, [each.requires_grad for each in module.parameters()]
        assert kinds == ({torch.nn.Parameter}, [True, True, False, False])
        return module.expanded.tolist(), module.inference.tolist(), module.bias.grad.tolist()

    assert world(2).run(program).results == [([1.0] * 3, [1.0] * 2, [1.5])] * 2


def test_the_host_waits_for_buffers_once_however_many_there_are(world):
    def program(group):
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        class Counting(TorchDispatchMode):
            """Counts what returns numbers to Python, for which a GPU must be waited for."""

            count = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.count += func.overloadpacket in (
                    torch.ops.aten.equal,
                    torch.ops.aten._local_scalar_dense,
                    torch.ops.aten.is_nonzero,
                )
                return func(*args, **(kwargs or {}))

        counts = []
        for buffers in (1, 20):
            module = torch.nn.Linear(1, 1)
            for number in range(buffers):
                module.register_buffer(f"b{number}", torch.zeros(3))
            sync = mp.torch.data_parallel(module, group)
            versions = [each._version for each in module.buffers()]
            module.b0.data.fill_(group.rank)
            with Counting() as counting, sync.step():
                module(torch.ones(1, 1)).sum().backward()
            counts.append(counting.count)
            assert module.b0.tolist() == [0.0] * 3
            # Autograd learns of the changed one alone.
            assert [each._version - then for each, then in zip(module.buffers(), versions, strict=True)] == [
                group.rank, *[0] * (buffers - 1)
            ]  # fmt: skip
        return counts[1] - counts[0]

    assert world(2).run(program).results == [0, 0]


def test_a_module_keeps_its_sync_when_another_one_is_refused(world):
    def program(group):
        import torch

        net = torch.nn.Linear(3, 2, bias=False)
        mp.torch.data_parallel(net, group)
        with pytest.raises(UsageError, match="bucket_bytes"):
            mp.torch.data_parallel(net, group, bucket_bytes=0)
        (net(torch.ones(1, 3)).sum() * (group.rank + 1)).backward()
        return net.weight.grad.tolist()

    assert world(2).run(program).results == [[[1.5] * 3] * 2] * 2
