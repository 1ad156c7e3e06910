"""The version of oneaccord, alike in all its distributions."""

__version__: str = "0.1.0"
