"""The command ``oneaccord check``."""
