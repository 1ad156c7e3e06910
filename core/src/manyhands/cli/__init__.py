"""The command line: ``manyhands run | doctor | config | show | simulate | bench``. Typer and rich are imported nowhere else."""
