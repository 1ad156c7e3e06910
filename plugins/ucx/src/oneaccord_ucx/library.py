"""UCX's library libucp in this process: which one, and its functions, as far as the backend needs them.

The declarations are those of ``ucp.h``, which keep their meaning from 1.13 on: each structure says which of its fields count.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from oneaccord.api import BackendUnavailableError, CLibrary, load_library
from oneaccord_ucx import finding

__all__ = [
    "BUSY",
    "ERROR_HANDLER",
    "IN_PROGRESS",
    "EndpointParams",
    "Params",
    "RequestParams",
    "Ucp",
    "WorkerParams",
    "diagnose",
    "load",
    "status_of",
]

OLDEST = (1, 13)
"""The oldest version, and the one whose meaning of everything is asked for."""

BUSY = -15
IN_PROGRESS = 1
_FIRST_ERROR = (1 << 64) - 100
"""Where a function returns a pointer, the highest ones are errors."""

ERROR_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int8)


class Params(ctypes.Structure):
    """``ucp_params_t``: features are bit 0."""

    _fields_ = [("field_mask", ctypes.c_uint64), ("features", ctypes.c_uint64), ("rest", ctypes.c_byte * 112)]


class WorkerParams(ctypes.Structure):
    """``ucp_worker_params_t``: the thread mode is bit 0, flags are bit 5."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("thread_mode", ctypes.c_int),
        ("_until_flags", ctypes.c_byte * 152),
        ("flags", ctypes.c_uint64),
        ("rest", ctypes.c_byte * 80),
    ]


class EndpointParams(ctypes.Structure):
    """``ucp_ep_params_t``: the address is bit 0, the error mode bit 1, the handler bit 2, user data bit 3."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_char_p),
        ("error_mode", ctypes.c_int),
        ("error_handler", ERROR_HANDLER),
        ("error_argument", ctypes.c_void_p),
        ("user_data", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 104),
    ]


class RequestParams(ctypes.Structure):
    """``ucp_request_param_t``: flags are bit 4."""

    _fields_ = [("mask", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("rest", ctypes.c_byte * 112)]


_POINTER = ctypes.c_void_p
_STATUS = ctypes.c_int8
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ucp_cleanup": (None, (_POINTER,)),
    "ucp_config_modify": (_STATUS, (_POINTER, ctypes.c_char_p, ctypes.c_char_p)),
    "ucp_config_read": (_STATUS, (ctypes.c_char_p, ctypes.c_char_p, _POINTER)),
    "ucp_config_release": (None, (_POINTER,)),
    "ucp_ep_close_nbx": (_POINTER, (_POINTER, _POINTER)),
    "ucp_ep_create": (_STATUS, (_POINTER, _POINTER, _POINTER)),
    "ucp_get_version": (None, (_POINTER, _POINTER, _POINTER)),
    "ucp_init_version": (_STATUS, (ctypes.c_uint, ctypes.c_uint, _POINTER, _POINTER, _POINTER)),
    "ucp_request_cancel": (None, (_POINTER, _POINTER)),
    "ucp_request_check_status": (_STATUS, (_POINTER,)),
    "ucp_request_free": (None, (_POINTER,)),
    "ucp_tag_recv_nbx": (_POINTER, (_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64, _POINTER)),
    "ucp_tag_send_nbx": (_POINTER, (_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_uint64, _POINTER)),
    "ucp_worker_arm": (_STATUS, (_POINTER,)),
    "ucp_worker_create": (_STATUS, (_POINTER, _POINTER, _POINTER)),
    "ucp_worker_destroy": (None, (_POINTER,)),
    "ucp_worker_get_address": (_STATUS, (_POINTER, _POINTER, _POINTER)),
    "ucp_worker_get_efd": (_STATUS, (_POINTER, _POINTER)),
    "ucp_worker_progress": (ctypes.c_uint, (_POINTER,)),
    "ucp_worker_release_address": (None, (_POINTER, _POINTER)),
    "ucs_status_string": (ctypes.c_char_p, (_STATUS,)),
}


class Ucp(CLibrary):
    """The functions of one libucp, by their names without ``ucp_``."""

    name: ClassVar[str] = "UCX"
    file: ClassVar[str] = finding.FILE
    oldest: ClassVar[tuple[int, ...]] = OLDEST
    functions: ClassVar[Mapping[str, tuple[Any, tuple[Any, ...]]]] = _FUNCTIONS

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._tame(self.handle)

    def _tame(self, handle: ctypes.CDLL) -> None:
        """Leave standard output and the signals of crashes to Python. Functions that not every version has may be missing."""
        self._set_global = getattr(handle, "ucs_global_opts_set_value", None)
        self.set_global("LOG_LEVEL", "fatal")
        disable_signals = getattr(handle, "ucs_debug_disable_signals", None)
        if disable_signals is not None:
            disable_signals.restype = None
            disable_signals()

    def set_global(self, name: str, value: str) -> bool:
        """Set a variable of the whole process; return whether there is such a one."""
        if self._set_global is None:
            return False
        self._set_global.restype, self._set_global.argtypes = _STATUS, (ctypes.c_char_p, ctypes.c_char_p)
        return not self._set_global(name.encode(), value.encode())


def status_of(pointer: int | None) -> int:
    """Return the status that a returned pointer stands for: 0 if it is done, `IN_PROGRESS` if it is a request."""
    if pointer is None:
        return 0
    return pointer - (1 << 64) if pointer >= _FIRST_ERROR else IN_PROGRESS


_load_path = cache(Ucp)


def load(wanted: str = "auto") -> Ucp:
    """Return the library, which this process keeps.

    Parameters
    ----------
    wanted
        ``"auto"``, ``"system"``, ``"wheel"``, or a path.

    Raises
    ------
    BackendUnavailableError
        It cannot be loaded, or the process has loaded another one already.
    """
    loaded, wheel = finding.loaded_library(), finding.wheel_library()
    system = [path for path in (finding.SONAME, finding.beside_python()) if path]
    known: dict[str, list[str | None]] = {"auto": [*system, wheel], "system": [*system], "wheel": [wheel]}
    paths = [path for path in known.get(wanted, [wanted]) if path is not None]
    hint = "the wheel libucx-cu12 is not installed" if wanted in ("auto", "wheel") and wheel is None else ""
    if loaded is not None:
        # Two versions in one process would mix: each looks up functions of the other.
        named = (wheel if wanted == "wheel" else wanted) if wanted not in ("auto", "system") else None
        if named is not None and not (Path(named).exists() and Path(named).samefile(loaded)):
            raise BackendUnavailableError(
                f"this process has loaded UCX from {loaded} already, and backends.ucx.library asks for {named}: only one can be in a "
                'process; set library = "auto" to take the loaded one'
            )
        paths = [loaded]
    return load_library(_load_path, "UCX", paths, hint)


def diagnose() -> list[tuple[str, str]]:
    """Return the version and the path of UCX, and the adapters of this host, for doctor."""
    try:
        ucp = load()
    except BackendUnavailableError as error:
        return [("UCX", str(error))]
    ports = ", ".join(finding.adapters()) or "no adapter on this host"
    if finding.adapters() and not list(Path(ucp.path).parent.glob("ucx/libuct_ib.so*")):
        ports += "; this UCX was built without support for them"
    return [("UCX", f"{ucp.words}, {ucp.path}"), ("InfiniBand and RoCE", ports)]
