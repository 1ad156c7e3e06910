"""The program of each rank of ``manyhands bench``: ``manyhands run -n 2 -m manyhands.bench.worker PLAN``."""

from __future__ import annotations

import sys

from manyhands.bench.measure import main

if __name__ == "__main__":
    main(sys.argv[1:])
