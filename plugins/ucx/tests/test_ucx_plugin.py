"""What the ucx backend says of itself, which library it takes, and which devices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from oneaccord.api import BackendUnavailableError, ConfigError
from oneaccord_ucx import devices, finding, library
from oneaccord_ucx.config import UcxConfig
from oneaccord_ucx.devices import devices_for
from oneaccord_ucx.library import IN_PROGRESS, diagnose, load, status_of
from oneaccord_ucx.plugin import oneaccord_register_backends


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A host without UCX: its wheel, the loader's, and the loaded one may be put there."""
    here = SimpleNamespace(wheel=tmp_path / "wheel", folder=tmp_path / "system", asked=[], broken=False)
    here.folder.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{here.folder}")
    monkeypatch.setattr(finding, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(here.wheel)]))
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr(finding, "loaded_library", lambda: None)
    monkeypatch.setattr(finding, "python_folders", lambda: [tmp_path / "prefix" / "lib"])
    here.prefix = tmp_path / "prefix"

    def load_path(path: str) -> str:
        here.asked.append(path)
        if here.broken or (path == finding.SONAME and not list(here.folder.iterdir())):
            raise OSError(f"{path}: cannot open shared object file")
        return path

    monkeypatch.setattr(library, "_load_path", load_path)
    return here


def put(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / finding.SONAME).touch()
    return str(folder / finding.SONAME)


def test_the_probe_says_what_is_missing_and_what_brings_it(places: Any):
    probe = oneaccord_register_backends().probe
    reason = probe()
    assert reason is not None
    assert all(words in reason for words in ("libucp.so.0 was not found", "libucx0", "pip install libucx-cu12"))
    put(places.wheel / "lib")
    assert probe() is None


@pytest.mark.parametrize("where", ["the loader's path", "the loader's cache", "beside Python", "loaded"])
def test_a_library_of_the_system_will_do(places: Any, monkeypatch: pytest.MonkeyPatch, where: str):
    if where == "the loader's path":
        put(places.folder)
    elif where == "beside Python":
        path = put(places.prefix / "lib")
        assert load("system") == path
    elif where == "the loader's cache":
        monkeypatch.setattr("ctypes.util.find_library", lambda name: "libucp.so.0")
    else:
        monkeypatch.setattr(finding, "loaded_library", lambda: "/opt/mpi/libucp.so.0")
    assert finding.missing() is None


def test_the_system_s_library_comes_before_the_wheel_because_it_knows_the_network(places: Any):
    wheel = put(places.wheel / "lib")
    assert load() == wheel
    assert load("wheel") == wheel
    put(places.folder)
    assert load() == load("system") == finding.SONAME
    assert load("/opt/ucx/libucp.so") == "/opt/ucx/libucp.so"


def test_a_library_that_cannot_be_loaded_is_told_with_all_that_was_tried(places: Any):
    with pytest.raises(BackendUnavailableError, match=r"libucp\.so\.0: cannot open.*; the wheel libucx-cu12 is not installed"):
        load()
    with pytest.raises(BackendUnavailableError, match="the wheel libucx-cu12 is not installed"):
        load("wheel")
    ((what, words),) = diagnose()
    assert (what, "cannot be loaded" in words) == ("UCX", True)


def test_a_process_has_one_ucx(places: Any, monkeypatch: pytest.MonkeyPatch):
    wheel, mpi = put(places.wheel / "lib"), put(places.folder)
    monkeypatch.setattr(finding, "loaded_library", lambda: mpi)
    assert load() == load("system") == load(mpi) == mpi
    for other in ("wheel", wheel, "/nowhere/libucp.so"):
        with pytest.raises(BackendUnavailableError, match=r"has loaded UCX from .*system.* already"):
            load(other)


def test_a_library_that_is_no_ucx_or_too_old_is_refused():
    with pytest.raises(BackendUnavailableError, match=r"has no function ucp_cleanup: oneaccord needs UCX 1\.13"):
        library.Ucp("libc.so.6")


def test_doctor_names_the_version_and_the_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    ucp = SimpleNamespace(words="1.99.0", path=str(tmp_path / "libucp.so.0"))
    monkeypatch.setattr(library, "load", lambda: ucp)
    monkeypatch.setattr(finding, "adapters", list)
    assert diagnose() == [("UCX", f"1.99.0, {ucp.path}"), ("InfiniBand and RoCE", "no adapter on this host")]
    monkeypatch.setattr(finding, "adapters", lambda: ["mlx5_0:1", "mlx5_1:1"])
    assert diagnose()[1][1] == "mlx5_0:1, mlx5_1:1; this UCX was built without support for them"
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx" / "libuct_ib.so.0").touch()
    assert diagnose()[1][1] == "mlx5_0:1, mlx5_1:1"


def test_ucx_listens_on_the_interface_of_the_host_s_address_and_on_every_adapter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "adapters", lambda: ["mlx5_0:1"])
    assert devices_for("127.0.0.1") == devices_for("127.0.0.9") == ["lo"]
    monkeypatch.setattr(devices, "_addresses", lambda name: [devices.ip_address("192.0.2.7")] if name == "lo" else [])
    assert devices_for("192.0.2.7") == ["lo", "mlx5_0:1"]
    with pytest.raises(ConfigError, match=r"has the address 192\.0\.2\.8, by which this rank reaches the others"):
        devices_for("192.0.2.8")


@pytest.mark.parametrize(
    "wrong",
    [
        {"transports": ()},
        {"transports": ("tcp", "")},
        {"transports": ("tcp", "shm"), "errors": "peer"},
        {"errors": "some"},
        {"spin_us": -1},
        {"tls": "tcp"},
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ValidationError):
        UcxConfig(**wrong)


def test_ucx_notices_lost_peers_where_it_can():
    assert UcxConfig().notices_lost_peers
    assert not UcxConfig(transports=("tcp", "shm")).notices_lost_peers
    assert UcxConfig(transports=("tcp", "shm")).used == (
        "tcp",
        "posix",
        "sysv",
    )  # without cma, which aborts who reads a dead rank's memory
    assert not UcxConfig(errors="none").notices_lost_peers


@pytest.mark.parametrize(
    ("pointer", "status"), [(None, 0), (0x7F00_0000_0010, IN_PROGRESS), ((1 << 64) - 25, -25), ((1 << 64) - 100, -100)]
)
def test_a_pointer_that_ucx_returns_is_nothing_a_request_or_an_error(pointer: int | None, status: int):
    assert status_of(pointer) == status
