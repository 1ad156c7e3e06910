"""The program of each rank of ``manyhands bench``: ``manyhands run -n 4 -m manyhands.tuning.worker PLAN``."""

from __future__ import annotations

import sys

from manyhands.tuning.measure import main

if __name__ == "__main__":
    main(sys.argv[1:])
