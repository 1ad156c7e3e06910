"""``python -m manyhands``: the command line."""

from __future__ import annotations

import sys

from manyhands.cli.main import main

sys.exit(main())
