"""The command line: ``manyhands run | doctor | config``. Typer and rich are imported nowhere else."""
