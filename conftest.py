"""What holds for the tests of every distribution."""

from hypothesis import settings

# An example that takes long says something about the computer, which other programs use as well, and nothing about the code.
settings.register_profile("manyhands", deadline=None)
settings.load_profile("manyhands")
