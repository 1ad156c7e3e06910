"""UCC's library libucc in this process, as far as the backend needs it.

The declarations are those of ``ucc.h``, API 1. Later versions append fields to structures, so that each is given more room than any version
reads; what is not asked for by a mask is zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from oneaccord.api import BackendUnavailableError, CLibrary, load_library, loaded_libraries
from oneaccord_ucc import finding

__all__ = [
    "IN_PROGRESS",
    "NO_MESSAGE",
    "OK",
    "OLDEST",
    "Arguments",
    "ContextParams",
    "LibParams",
    "Meeting",
    "TeamParams",
    "Ucc",
    "diagnose",
    "load",
]

OLDEST = (1, 5)
OK, IN_PROGRESS, NO_MESSAGE = 0, 1, -6
_ROOM = 256
"""More bytes than any version has appended to a structure."""

_Gather = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)
_Ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Meeting(ctypes.Structure):
    """``ucc_oob_coll_t``: how UCC's ranks tell each other something before UCC connects them."""

    Gather = _Gather
    Ask = _Ask
    _fields_ = [
        ("allgather", _Gather),
        ("req_test", _Ask),
        ("req_free", _Ask),
        ("coll_info", ctypes.c_void_p),
        ("n_oob_eps", ctypes.c_uint32),
        ("oob_ep", ctypes.c_uint32),
    ]


class LibParams(ctypes.Structure):
    """``ucc_lib_params_t``: the thread mode is bit 0."""

    MULTIPLE = 2
    _fields_ = [("mask", ctypes.c_uint64), ("thread_mode", ctypes.c_int), ("rest", ctypes.c_byte * _ROOM)]


class ContextParams(ctypes.Structure):
    """``ucc_context_params_t``: the meeting is bit 2."""

    _fields_ = [
        ("mask", ctypes.c_uint64),
        ("type", ctypes.c_int),
        ("sync_type", ctypes.c_int),
        ("oob", Meeting),
        ("rest", ctypes.c_byte * _ROOM),
    ]


class TeamParams(ctypes.Structure):
    """``ucc_team_params_t``: the endpoint is bit 2, that they are numbered without gaps bit 4, the meeting bit 7."""

    _fields_ = [
        ("mask", ctypes.c_uint64),
        ("_until_ep", ctypes.c_byte * 24),
        ("ep", ctypes.c_uint64),
        ("ep_list", ctypes.c_void_p),
        ("ep_range", ctypes.c_int),
        ("team_size", ctypes.c_uint64),
        ("sync_type", ctypes.c_int),
        ("oob", Meeting),
        ("rest", ctypes.c_byte * _ROOM),
    ]


class _Buffer(ctypes.Structure):
    """``ucc_coll_buffer_info_t``, in the room of the union that it is part of."""

    _fields_ = [
        ("buffer", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("datatype", ctypes.c_uint64),
        ("mem_type", ctypes.c_int),
        ("_rest", ctypes.c_byte * 8),
    ]


class Arguments(ctypes.Structure):
    """``ucc_coll_args_t``: flags are bit 0."""

    IN_PLACE = 1
    _fields_ = [
        ("mask", ctypes.c_uint64),
        ("coll_type", ctypes.c_int),
        ("src", _Buffer),
        ("dst", _Buffer),
        ("op", ctypes.c_int),
        ("flags", ctypes.c_uint64),
        ("root", ctypes.c_uint64),
        ("rest", ctypes.c_byte * _ROOM),
    ]


_POINTER = ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ucc_collective_finalize": (ctypes.c_int, (_POINTER,)),
    "ucc_collective_init": (ctypes.c_int, (_POINTER, _POINTER, _POINTER)),
    "ucc_collective_post": (ctypes.c_int, (_POINTER,)),
    "ucc_context_config_read": (ctypes.c_int, (_POINTER, ctypes.c_char_p, _POINTER)),
    "ucc_context_config_release": (None, (_POINTER,)),
    "ucc_context_create": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "ucc_context_destroy": (ctypes.c_int, (_POINTER,)),
    "ucc_context_progress": (ctypes.c_int, (_POINTER,)),
    "ucc_finalize": (ctypes.c_int, (_POINTER,)),
    "ucc_get_version": (None, (_POINTER, _POINTER, _POINTER)),
    "ucc_init_version": (ctypes.c_int, (ctypes.c_uint, ctypes.c_uint, _POINTER, _POINTER, _POINTER)),
    "ucc_lib_config_read": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_char_p, _POINTER)),
    "ucc_lib_config_release": (None, (_POINTER,)),
    "ucc_status_string": (ctypes.c_char_p, (ctypes.c_int,)),
    "ucc_team_create_post": (ctypes.c_int, (_POINTER, ctypes.c_uint32, _POINTER, _POINTER)),
    "ucc_team_create_test": (ctypes.c_int, (_POINTER,)),
    "ucc_team_destroy": (ctypes.c_int, (_POINTER,)),
}


class Ucc(CLibrary):
    """The functions of one libucc, by their names without ``ucc_``."""

    name: ClassVar[str] = "UCC"
    file: ClassVar[str] = "libucc.so"
    oldest: ClassVar[tuple[int, ...]] = OLDEST
    why_oldest: ClassVar[str] = "before, sums of floats differed from rank to rank"
    functions: ClassVar[Mapping[str, tuple[Any, tuple[Any, ...]]]] = _FUNCTIONS

    def __init__(self, path: str) -> None:
        super().__init__(path)
        # Leave standard output and the signals of crashes to Python. Not every version of UCX has these functions.
        for name, arguments in (("global_opts_set_value", (b"LOG_LEVEL", b"fatal")), ("debug_disable_signals", ())):
            with contextlib.suppress(AttributeError):
                getattr(self.handle, f"ucs_{name}")(*arguments)


@cache
def load() -> Ucc:
    """Return the library, which this process keeps; raises as `Ucc`, and where there is none."""
    path = finding.find()
    if path is None:
        raise BackendUnavailableError(finding.missing() or "")
    return load_library(Ucc, "UCC", [path], "if it is a library of UCX that is missing, add its folder to LD_LIBRARY_PATH")


def diagnose() -> list[tuple[str, str]]:
    """Return the version and the path of UCC, and its UCX, for doctor."""
    try:
        ucc = load()
    except BackendUnavailableError as error:
        return [("UCC", str(error))]
    return [("UCC", f"{ucc.words}, {ucc.path}"), ("UCX", ", ".join(loaded_libraries("libucs.so")))]
