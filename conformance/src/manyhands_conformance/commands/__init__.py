"""The command ``manyhands check``."""
