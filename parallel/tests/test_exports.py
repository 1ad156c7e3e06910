"""Names are loaded when they are first used, and the libraries with them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import oneaccord_parallel as mp


def test_the_modules_for_a_library_do_not_import_it():
    program = "import sys, oneaccord_parallel as mp; mp.torch.Stage, mp.jax.Stage; print({'torch', 'jax'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


@pytest.mark.peers
@pytest.mark.parametrize("module", [mp, mp.compress, mp.jax, mp.torch], ids=lambda module: module.__name__)
def test_every_public_name_is_there(module):
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        getattr(module, name)
    with pytest.raises(AttributeError, match=rf"module '{module.__name__}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018 - it is what fails
