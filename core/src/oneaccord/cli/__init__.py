"""The command line: ``oneaccord run | doctor | config | explain | certs``. In core, only this room imports typer, and only where a command needs it."""
