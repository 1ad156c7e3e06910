"""The plugin as others see it: its description, its probe, and what doctor tells."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import pytest
from support.fake_gpu import fake_cupy

from oneaccord.api import BackendUnavailableError, ConfigError, install_command
from oneaccord.config import load
from oneaccord_nccl import _cuda, _nccl, diagnosis, plugin
from oneaccord_nccl.diagnosis import diagnose
from oneaccord_nccl.plugin import INSTALL, oneaccord_register_backends


def without(monkeypatch, *packages):
    """Let some packages be not installed."""

    def installed(name):
        if name.partition("-")[0].removesuffix("4py") in packages:
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(diagnosis, "version", installed)
    for name in [*packages, *(f"{package}.{rest}" for package in packages for rest in ("cuda", "bindings", "bindings.nccl"))]:
        monkeypatch.setitem(sys.modules, name, None)
    find = plugin.find_spec
    monkeypatch.setattr(plugin, "find_spec", lambda name: None if name in packages else find(name))


def test_the_description_says_what_the_backend_is():
    spec = oneaccord_register_backends()
    assert (spec.name, spec.devices, spec.capabilities, spec.auto_priority) == ("nccl", ("cuda",), frozenset(), None)
    assert spec.install == "pip install 'oneaccord[nccl]', or 'oneaccord[nccl-cuda13]' for CUDA 13"


@pytest.mark.parametrize(
    "table", [{"device": -1}, {"max_ctas": 0}, {"max_ctas": 65}, {"accumulate": "float64"}, {"check": "kinds"}]
)
def test_a_wrong_config_is_refused(table):
    resolved = load({"backends": {"nccl": table}}, environ={})
    with pytest.raises(ConfigError, match=f"backends.nccl.{next(iter(table))} = "):
        resolved.backend_config("nccl")


def test_the_probe_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(plugin, "_DRIVER", "libc.so.6")
    with monkeypatch.context() as patch:
        without(patch, "cupy", "nccl")
        assert plugin.probe() == "CuPy is not installed"
    monkeypatch.setattr(plugin, "is_missing", lambda package: package == "nccl")
    assert plugin.probe() == "nccl4py, NVIDIA's binding of NCCL, is not installed"
    monkeypatch.setattr(plugin, "is_missing", lambda package: False)
    assert plugin.probe() is None
    monkeypatch.setattr(plugin, "_DRIVER", "libno_such_driver.so.1")
    assert plugin.probe() == "there is no driver of NVIDIA's on this host: libno_such_driver.so.1 cannot be loaded"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert plugin.probe() == "NCCL needs Linux, and this is darwin"


def test_the_probe_sees_what_is_there(nccl, monkeypatch):
    monkeypatch.setattr(plugin, "_DRIVER", "libc.so.6")
    assert plugin.probe() is None


def test_a_missing_library_is_refused_in_words(monkeypatch):
    without(monkeypatch, "cupy", "nccl")
    with pytest.raises(
        BackendUnavailableError, match=r"^nccl4py cannot be imported \(.*\): " + re.escape(install_command(INSTALL))
    ):
        _nccl.load()
    with pytest.raises(
        BackendUnavailableError, match=r"^CuPy cannot be imported \(.*\): " + re.escape(install_command(INSTALL))
    ):
        _cuda.load()


@pytest.mark.parametrize("nccl", ["fake"], indirect=True)  # it stands for a binding of another version
def test_a_binding_that_lacks_something_is_refused_in_words(nccl, monkeypatch):
    monkeypatch.delattr(type(nccl), "comm_abort")
    monkeypatch.delattr(type(nccl), "send")
    with pytest.raises(BackendUnavailableError) as caught:
        _nccl.load()
    assert str(caught.value) == "nccl4py 2.32.3 has no send, comm_abort in nccl.bindings.nccl: pip install 'nccl4py>=0.6,<0.7'"


@pytest.mark.parametrize("nccl", ["fake"], indirect=True)  # a process loads the library once
def test_a_library_that_cannot_be_loaded_is_refused_in_words(nccl, monkeypatch):
    def fail():
        raise RuntimeError("libnccl.so.2: no such file")

    monkeypatch.setattr(nccl, "get_version", fail)
    with pytest.raises(BackendUnavailableError) as caught:
        _nccl.load()
    command = install_command(INSTALL)
    assert str(caught.value) == f"NCCL's library cannot be loaded (libnccl.so.2: no such file): {command}"


def test_doctor_tells_what_is_missing_where_there_is_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(diagnosis, "_DRIVER", tmp_path / "missing")
    without(monkeypatch, "cupy", "nccl")
    # What is not installed is not asked, and what cannot run is said by core.
    missing = f"there is no {tmp_path / 'missing'}"
    assert diagnose() == [("driver", missing), ("CuPy", "not installed"), ("nccl4py", "not installed")]


def test_doctor_tells_once_that_there_is_no_gpu(nccl, monkeypatch):
    def no_driver(*_):
        raise fake_cupy.CUDARuntimeError(35)

    monkeypatch.setattr(fake_cupy.cuda.runtime, "driverGetVersion", no_driver)
    monkeypatch.setattr(fake_cupy.cuda.runtime, "getDeviceCount", no_driver)
    facts = diagnose()
    assert [what for what, value in facts if value.startswith("unknown")] == ["CUDA, GPUs"], facts
    assert facts[-2][0] == "NCCL"


def test_doctor_tells_of_versions_gpus_and_their_links(nccl, monkeypatch, tmp_path):
    monkeypatch.setattr(plugin, "_DRIVER", "libc.so.6")
    monkeypatch.setattr(diagnosis, "_DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 13\n"
    )
    monkeypatch.setattr(fake_cupy.cuda.runtime, "deviceCanAccessPeer", lambda device, peer: {device, peer} <= {0, 1, 2})
    facts = diagnose()
    assert facts[0] == ("driver", "580.65.06")
    assert facts[3:] == [
        ("NCCL", f"2.32.3, {import_module('nccl.bindings.nccl').get_library_path()}"),
        ("CUDA of the driver", "13.0"),
        ("CUDA runtime", "12.9"),
        ("GPUs", "4"),
        *((f"GPU {n}", f"Fake GPU, 16 GiB, compute capability 9.0, PCI bus id 0000:0{n + 1}:00") for n in range(4)),
        ("GPU 0 reaches", "1, 2"),
        ("GPU 1 reaches", "0, 2"),
        ("GPU 2 reaches", "0, 1"),
        ("GPU 3 reaches", "no other GPU directly"),
        ("GPU links", "whether they are NVLink is not known here: nvidia-smi topo -m shows it"),
    ]


def test_doctor_goes_on_after_a_step_that_fails(nccl, monkeypatch):
    describe = fake_cupy.cuda.runtime.getDeviceProperties

    def properties(device):
        if device == 1:
            raise fake_cupy.CUDARuntimeError(719)
        return describe(device)

    monkeypatch.setattr(fake_cupy.cuda.runtime, "getDeviceProperties", properties)
    monkeypatch.setattr(fake_cupy.cuda.runtime, "driverGetVersion", lambda: 0)
    found = dict(diagnose())
    assert found["CUDA of the driver"] == "no driver is loaded"
    assert found["GPU 1"] == "unknown: CUDA: cudaErrorLaunchFailure: unspecified launch failure"
    assert found["GPU 2"].startswith("Fake GPU, ")
