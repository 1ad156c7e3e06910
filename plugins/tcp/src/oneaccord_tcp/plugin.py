"""The description of the tcp backend: light, so that listing backends costs nothing."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from oneaccord.api import BackendConfig, BackendSpec, hookimpl

__all__ = ["MOST_STREAMS", "TcpConfig", "oneaccord_register_backends"]

MOST_STREAMS: Final = 16
"""The largest number for `TcpConfig.streams`: more connections take descriptors and add little."""


def _streams(value: object) -> object:
    """Return the given value; raise ValueError if it is not a number of streams."""
    text = str(value)
    if text != "auto" and not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_STREAMS):
        raise ValueError(f'it should be "auto" or a number from 1 to {MOST_STREAMS}')
    return value


class TcpConfig(BackendConfig):
    """The table ``[backends.tcp]``."""

    interface: str | None = Field(default=None, description='Listen at the address of this network interface, such as "eth0".')
    host: str | None = Field(default=None, description="Listen at this address of the host; it overrides interface.")
    buffer_bytes: int = Field(
        default=1 << 20,
        ge=1 << 16,
        le=1 << 28,
        description="The size of the kernel's send and receive buffer of each connection.",
    )
    spin_us: int = Field(
        default=200,
        ge=0,
        le=1000,
        description="The microseconds of active waiting before the process sleeps; 0 to sleep at once.",
    )
    congestion_control: str = Field(
        default="auto",
        description='The TCP congestion control: "auto" takes reno between ranks of one host and the host\'s default elsewhere.',
    )
    streams: Annotated[int | Literal["auto"], BeforeValidator(_streams)] = Field(
        default="auto",
        description=f'The number of connections, 1 to {MOST_STREAMS}, for a long message between two ranks: "auto" is 1 if the round '
        "trip is short, and several if it is long. The lower of the two ranks decides.",
    )


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="tcp",
        summary="TCP sockets, between processes on one host or many",
        factory="oneaccord_tcp.backend:TcpBackend",
        checksum=True,
        tls=True,
        api_version=1,
        config=TcpConfig,
        install="pip install 'oneaccord[tcp]'",
        selection="oneaccord_tcp:selection.toml",
        auto_priority=50,
    )
