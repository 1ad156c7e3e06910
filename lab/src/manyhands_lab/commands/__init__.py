"""The commands ``manyhands bench``, ``show`` and ``simulate``; the command line of core finds them by entry points."""
