"""The version of manyhands, alike in all its distributions."""

__version__: str = "0.1.0"
