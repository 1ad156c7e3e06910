"""The library in C under the real nccl4py: what it takes from where, what it refuses, and what an older one lacks."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.fake_gpu import fake_cuda, through_nccl4py
from support.fake_gpu.compiled import compiler
from support.fake_gpu.fake_nccl import FakeNccl

from oneaccord_nccl import _nccl

_UNSET = -2147483648
_NEWER = (
    *("AlltoAll", "Gather", "Scatter", "RedOpCreatePreMulSum", "RedOpDestroy", "CommRegister", "CommDeregister", "MemAlloc"),
    *("MemFree", "CommWindowRegister", "CommWindowDeregister", "CommRevoke"),
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    """A fake NCCL under nccl4py, on a machine with a GPU."""
    made = FakeNccl()
    through_nccl4py.install(made, "nccl4py", monkeypatch)
    fake_cuda.start_up(1)
    return made


@pytest.fixture
def raw(fake: FakeNccl) -> Any:
    """The module of nccl4py that the plugin calls."""
    return through_nccl4py.real_binding()


def join(raw: Any, **numbers: int) -> Any:
    """Return the communicator of one rank, made with a configuration."""
    config = raw.Config()
    for name, number in numbers.items():
        setattr(config, name, number)
    return raw.comm_init_rank_config(1, raw.get_unique_id(), 0, config.ptr)


def test_numbers_of_a_configuration_are_read_where_nccl4py_writes_them(raw: Any) -> None:
    fields = {name: (dtype.kind, offset) for name, (dtype, offset) in raw.config_dtype.fields.items()}
    numbers = {name: offset for name, (kind, offset) in fields.items() if name not in {"size_", "magic", "version"}}
    del numbers["net_name"], numbers["comm_name"]  # words
    assert through_nccl4py.config_offsets() == numbers


def test_a_configuration_comes_whole_to_the_fake(raw: Any, fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    through = through_nccl4py._config
    monkeypatch.setattr(through_nccl4py, "_config", lambda *given: seen.append(through(*given)) or seen[-1])
    names = list(through_nccl4py.config_offsets())
    given = {name: place for place, name in enumerate(names, 1)} | {"blocking": 1, "min_ctas": 3, "max_ctas": 4}
    join(raw, **given)
    assert {name: getattr(seen[0], name) for name in names} == given
    fake.version = 23007
    join(raw, **given)
    newer = {"launch_order_implicit", "num_rma_sig", "rma_eager_init", "host_cft_mode", "nvls_host_mode"}
    assert {name: getattr(seen[1], name, _UNSET) for name in names} == {**given, **dict.fromkeys(newer, _UNSET)}


@pytest.mark.parametrize(
    "numbers", [{"blocking": 2}, {"cga_cluster_size": -1}, {"max_ctas": 0}, {"min_ctas": 5, "max_ctas": 4}]
)
def test_a_configuration_that_nccl_refuses_is_refused(raw: Any, fake: FakeNccl, numbers: dict[str, int]) -> None:
    with pytest.raises(raw.NCCLError) as caught:
        join(raw, **numbers)
    assert caught.value.status == 4
    assert fake.open_communicators() == 0


def test_only_what_is_marked_as_a_configuration_is_one(raw: Any, fake: FakeNccl) -> None:
    config = raw.Config()
    ctypes.c_uint.from_address(config.ptr + 8).value ^= 1
    with pytest.raises(raw.NCCLError) as caught:
        raw.comm_init_rank_config(1, raw.get_unique_id(), 0, config.ptr)
    assert caught.value.status == 4


def test_what_is_beyond_the_end_of_a_configuration_is_not_set(raw: Any, fake: FakeNccl) -> None:
    config = raw.Config()
    config.max_ctas = 4
    config.launch_order_implicit = 1
    ctypes.c_size_t.from_address(config.ptr).value = through_nccl4py.config_offsets()["launch_order_implicit"]
    raw.comm_init_rank_config(1, raw.get_unique_id(), 0, config.ptr)
    (rank,) = fake._ranks.values()
    assert (rank.max_ctas, rank.is_ordered) == (4, False)


def test_each_function_that_the_plugin_needs_is_there(raw: Any) -> None:
    """What the fake cannot do yet is refused as a wrong use; a function that is missing would raise another error."""
    assert [name for name in _nccl._NAMES if not hasattr(raw, name)] == []
    comm = join(raw)
    calls = {
        "allto_all": (0, 0, 1, 0, comm, 0),
        "gather": (0, 0, 1, 0, 0, comm, 0),
        "scatter": (0, 0, 1, 0, 0, comm, 0),
        "red_op_create_pre_mul_sum": (0, 7, 1, comm),
        "red_op_destroy": (5, comm),
        "comm_register": (comm, 4096, 64),
        "comm_deregister": (comm, 1),
        "comm_window_register": (comm, 4096, 64, 0),
        "comm_window_deregister": (comm, raw.Window(1)),
        "mem_alloc": (64,),
        "mem_free": (4096,),
    }
    for name in [name for name in calls if not hasattr(FakeNccl, name)]:
        with pytest.raises(raw.NCCLError) as caught:
            getattr(raw, name)(*calls[name])
        assert (name, caught.value.status) == (name, 5)


def test_what_a_method_makes_comes_back(raw: Any, fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def mem_alloc(self: FakeNccl, size: int) -> int:
        given.append(size)
        return 1 << 46

    monkeypatch.setattr(FakeNccl, "mem_alloc", mem_alloc, raising=False)
    through_nccl4py._parameters.cache_clear()
    assert raw.mem_alloc((1 << 40) + 1) == 1 << 46
    monkeypatch.undo()
    through_nccl4py._parameters.cache_clear()
    assert given == [(1 << 40) + 1]


def test_an_error_of_the_fake_itself_is_no_refusal_of_nccls(raw: Any, fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(fake, "group_start", broken)
    with pytest.raises(raw.NCCLError, match="InternalError"):
        raw.group_start()
    assert fake.crimes == ["group_start raised KeyError('a defect')"]


def test_calls_of_communicators_that_do_not_block_are_in_progress(raw: Any, fake: FakeNccl) -> None:
    """nccl4py takes that for success; `comm_get_async_error` tells what came of it."""
    fake.hanging.add("comm_init")
    comm = join(raw, blocking=0)
    assert raw.comm_get_async_error(comm) == 7
    fake.hanging.clear()
    assert raw.comm_get_async_error(comm) == 0
    raw.comm_finalize(comm)


def test_an_older_nccl_lacks_functions_and_the_plugin_runs_all_the_same(tmp_path: Path) -> None:
    """In a process of its own, since nccl4py looks for the functions once."""
    if compiler() is None or through_nccl4py.find_nccl4py() is None:
        pytest.skip("there is no C compiler, or no nccl4py")
    program = f"""
        import numpy as np, pytest
        from support.fake_gpu import fake_cupy, through_nccl4py
        from support.fake_gpu.fake_nccl import FakeNccl

        with pytest.MonkeyPatch.context() as patch:
            raw = through_nccl4py.real_binding(hidden={[f"nccl{name}" for name in _NEWER]!r})
            fake = FakeNccl(22403)
            through_nccl4py.install(fake, "nccl4py", patch)
            cupy = fake_cupy.install(patch, 1)
            import oneaccord as oa
            from oneaccord_nccl import plugin

            patch.setattr(plugin, "_DRIVER", None)
            with oa.init(config={{"backend": "nccl"}}, rank=0, world_size=1) as group:
                print(group.all_reduce(cupy.full(3, 2.0, np.float32)).get().tolist())
            for call in (lambda: raw.comm_revoke(raw.Comm(1), 0), lambda: raw.mem_alloc(8)):
                try:
                    call()
                except Exception as error:
                    print(type(error).__name__)
            print(fake.crimes)
            fake_cupy.shut_down()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["[2.0, 2.0, 2.0]", "FunctionNotFoundError", "FunctionNotFoundError", "[]"], done.stderr
