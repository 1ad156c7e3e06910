"""What can be set of the ucx backend."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from oneaccord.api import BackendConfig

__all__ = ["UcxConfig"]

_SHARED_MEMORY = frozenset({"all", "cma", "knem", "mm", "posix", "shm", "sm", "sysv", "xpmem"})

_COPYING = ("posix", "sysv")
"""Shared memory into which both sides copy. UCX's words for shared memory also stand for cma, which reads the memory of the other process: where
that dies meanwhile, UCX aborts the reader."""

Word = Annotated[str, StringConstraints(pattern=r"^\S+$")]


class UcxConfig(BackendConfig):
    """The table ``[backends.ucx]``."""

    transports: tuple[Word, ...] = Field(
        default=("ib", "tcp"),
        min_length=1,
        description='What UCX may use, in its own words: "ib" is InfiniBand and RoCE, "shm" shared memory without cma. Alike on all ranks.',
    )
    devices: tuple[Word, ...] = Field(
        default=(),
        description='Network devices, such as "eth0" or "mlx5_0:1"; by default that of the host\'s address, and all of InfiniBand and RoCE.',
    )
    errors: Literal["auto", "peer", "none"] = Field(
        default="auto",
        description='Whether UCX itself notices a lost peer: "peer" or "none". "auto" is "none" with shared memory, which cannot. Alike on all ranks.',
    )
    library: Word = Field(
        default="auto",
        description='Which UCX: the path of libucp.so, "system", "wheel" (libucx-cu12), or "auto", which is the system\'s if there is one, else the wheel.',
    )
    variables: dict[Word, str] = Field(
        default={}, description='Variables of UCX without "UCX_", such as {RNDV_THRESH = "64k"}; they win over the environment.'
    )
    spin_us: int = Field(
        default=200,
        ge=0,
        le=1000,
        description="How many microseconds to wait actively before a thread sleeps; 0 to sleep at once.",
    )

    @property
    def notices_lost_peers(self) -> bool:
        """Whether UCX itself tells that a peer was lost."""
        return self.errors == "peer" or (self.errors == "auto" and not self._shared_memory())

    @property
    def used(self) -> tuple[str, ...]:
        """What UCX may use."""
        return tuple(each for name in self.transports for each in (_COPYING if name in ("shm", "sm") else (name,)))

    def _shared_memory(self) -> list[str]:
        return [name for name in self.transports if name in _SHARED_MEMORY]

    @model_validator(mode="after")
    def _check_errors(self) -> UcxConfig:
        if self.errors == "peer" and self._shared_memory():
            raise ValueError(
                f'errors = "peer" excludes the transport {self._shared_memory()[0]!r}: UCX does not notice a lost peer in shared memory; '
                'leave errors at "auto", and the job itself notices'
            )
        return self
