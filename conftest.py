"""What holds for the tests of every distribution."""

import contextlib

with contextlib.suppress(ModuleNotFoundError):  # the environments of the peers need none
    from hypothesis import settings

    # An example that takes long says something about the computer, which other programs use as well, and nothing about the code.
    settings.register_profile("manyhands", deadline=None)
    settings.load_profile("manyhands")
