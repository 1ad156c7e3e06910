"""The description of the backend; it imports no ZeroMQ."""

from importlib.util import find_spec

from oneaccord.api import BackendSpec, hookimpl


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="zeromq",
        summary="messages over ZeroMQ",
        factory="oneaccord_zeromq.backend:ZeromqBackend",
        probe=lambda: None if find_spec("zmq") else "pyzmq is not installed",
        install="pip install oneaccord-zeromq",
        api_version=1,
    )
