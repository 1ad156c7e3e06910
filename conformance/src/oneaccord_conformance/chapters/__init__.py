"""The checks, one module for each chapter; the names end in ``_``, since some are names of Python's."""
