"""Objects of torch's travel as pickles: what was changed on its way is not unpickled, and ends the job on all ranks."""

import os
import pickle

import pytest

from oneaccord.errors import ProtocolError
from oneaccord_simulated import run

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch deprecates what it uses itself
LONG = "x" * 500


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def broadcast(dist, rank):
    dist.broadcast_object_list([LONG])


def all_gather(dist, rank):
    dist.all_gather_object([None, None], LONG)


def gather(dist, rank):
    dist.gather_object(LONG, [None, None] if rank == 1 else None, 1)


def scatter(dist, rank):
    dist.scatter_object_list([None], [LONG, LONG] if rank == 0 else None)


def message(dist, rank):
    (dist.recv_object_list if rank else dist.send_object_list)([LONG], 1 - rank)


def group(dist, rank):
    dist.broadcast_object_list([LONG], group=dist.new_group([0, 1]))


def zero(dist, rank):
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    layers = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))]
    optimizer = ZeroRedundancyOptimizer(layers, torch.optim.SGD, lr=0.1)
    optimizer.consolidate_state_dict(to=1)


def transport(dist, rank):
    from datetime import timedelta

    import torch
    from torch.distributed.checkpoint._pg_transport import PGTransport

    transport = PGTransport(dist.distributed_c10d._get_default_group(), timedelta(seconds=20), torch.device("cpu"))
    if rank == 0:
        transport.send_checkpoint([1], {LONG: torch.zeros(3)})
    else:
        assert list(transport.recv_checkpoint(0)) == [LONG]


CALLS = [broadcast, all_gather, gather, scatter, message, group, zero, transport]


@pytest.fixture
def dist():
    torch = pytest.importorskip("torch")
    pytest.importorskip("oneaccord_torch")
    torch.set_num_threads(1)
    return torch.distributed


def on_the_path(usual, changed):
    """Change the bytes of objects that come to rank 1."""
    import torch

    def call(self, name, opts, result, *arguments, **named):
        handle = usual(self, name, opts, result, *arguments, **named)
        if self.group.rank == 1 and name != "send":
            handle.wait()
            tensors = [each for one in result for each in (one if isinstance(one, list) else [one])]
            for tensor in tensors:
                if tensor.dtype == torch.uint8 and tensor.numel() >= len(changed):
                    tensor.data.view(-1)[: len(changed)] = torch.frombuffer(bytearray(changed), dtype=torch.uint8)
        return handle

    return call


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_object_that_was_changed_on_its_way_is_not_unpickled(call, dist, tmp_path, monkeypatch):
    from oneaccord_torch.calls import Calls

    made = tmp_path / "made"
    monkeypatch.setattr(Calls, "_call", on_the_path(Calls._call, pickle.dumps(Evil(str(made)))))

    def program(world):
        dist.init_process_group("oneaccord")
        try:
            call(dist, world.rank)
            dist.barrier()
        except ProtocolError as error:
            return str(error)

    said = run(program, 2).results
    assert said[0] == said[1]
    assert said[0].startswith("rank 1 received a pickled object of torch's that no rank of this job has sealed")
    assert not made.exists()


@pytest.mark.parametrize("call", [zero, transport], ids=lambda call: call.__name__)
def test_what_has_functions_of_its_own_for_objects_moves_them(call, dist):
    def program(world):
        dist.init_process_group("oneaccord")
        call(dist, world.rank)
        dist.destroy_process_group()

    run(program, 2)


def test_objects_over_a_backend_of_torchs_own_stay_as_they_are(dist):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.distributed_c10d._get_default_group()
        # torch's RPC hands over a backend that has no group around it.
        for group in world, world._get_backend(dist.distributed_c10d.torch.device("cpu")):
            found = [None]
            dist.all_gather_object(found, LONG, group=group)
            assert found == [LONG]
    finally:
        dist.destroy_process_group()
