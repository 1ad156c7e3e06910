"""The description of the tcp backend: light, so that listing backends costs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from manyhands.api import BackendSpec, hookimpl

__all__ = ["TcpConfig", "manyhands_register_backends"]


@dataclass(frozen=True)
class TcpConfig:
    """The table ``[backends.tcp]``."""

    interface: str | None = field(
        default=None, metadata={"description": 'Listen at the address of this network interface, such as "eth0".'}
    )
    host: str | None = field(
        default=None, metadata={"description": "Listen at this address of the host; it wins over interface."}
    )
    buffer_bytes: int = field(
        default=1 << 20,
        metadata={
            "ge": 1 << 16,
            "le": 1 << 28,
            "description": "The size of the kernel's send and receive buffer of each connection.",
        },
    )
    spin_us: int = field(
        default=200,
        metadata={
            "ge": 0,
            "le": 1000,
            "description": "How many microseconds to wait actively before the process sleeps; 0 to sleep at once.",
        },
    )
    congestion_control: str = field(
        default="auto",
        metadata={
            "description": 'The TCP congestion control: "auto" takes reno between ranks of one host and the host\'s default elsewhere.'
        },
    )


@hookimpl
def manyhands_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="tcp",
        summary="TCP sockets, between processes on one host or many",
        factory="manyhands_tcp.backend:TcpBackend",
        api_version=1,
        config=TcpConfig,
        install="pip install 'manyhands[tcp]'",
        selection="manyhands_tcp:selection.toml",
        auto_priority=50,
    )
