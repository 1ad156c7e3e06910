"""The commands of this distribution; the only part that needs typer, which the command line brings."""
