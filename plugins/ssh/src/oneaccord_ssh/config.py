"""The options of the launcher."""

from __future__ import annotations

from pydantic import Field

from oneaccord.api import BackendConfig

__all__ = ["SshConfig"]


class SshConfig(BackendConfig):
    """The options of the launcher ``ssh``. What they leave out comes from ssh's own configuration, such as ``~/.ssh/config``."""

    hosts: tuple[str, ...] = Field(
        default=(),
        description='The hosts, each with the ranks that it takes: "node1:4". Hosts without a number share the other ranks evenly.',
    )
    user: str | None = Field(default=None, min_length=1, description="The user on the hosts.")
    port: int | None = Field(default=None, ge=1, le=65535, description="The port of their ssh servers.")
    identity_file: str | None = Field(default=None, min_length=1, description="The file of the private key.")
    config_file: str | None = Field(default=None, min_length=1, description="Another file in the place of ~/.ssh/config.")
    args: tuple[str, ...] = Field(
        default=(), description='Further words for ssh, such as "-o" and "StrictHostKeyChecking=accept-new".'
    )
    connect_timeout_s: int = Field(default=15, ge=1, le=3600, description="The most seconds that a connection may take.")
    addresses: dict[str, str] = Field(
        default_factory=dict,
        description="For a host's name, the address at which the other hosts reach it; by default the HostName of ssh's configuration, or the name.",
    )
    python: str | None = Field(
        default=None, description="The Python of the hosts; by default the path of this one, which must exist there too."
    )
    pythons: dict[str, str] = Field(default_factory=dict, description="The Python of single hosts, by the host's name.")
    folder: str | None = Field(
        default=None, description="The working directory on the hosts; by default the path of the one here."
    )
    gpus_per_host: int = Field(default=0, ge=0, description="The GPUs of each host.")
