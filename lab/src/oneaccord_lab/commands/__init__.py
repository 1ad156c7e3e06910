"""The commands ``oneaccord bench``, ``show`` and ``simulate``; the command line of core finds them by entry points."""
