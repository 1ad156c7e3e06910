"""``python -m oneaccord``: the command line."""

from __future__ import annotations

import sys

from oneaccord.cli.main import main

sys.exit(main())
