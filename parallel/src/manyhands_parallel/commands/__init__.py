"""What this distribution adds to the command line; the only part that needs typer, which the command line brings."""
