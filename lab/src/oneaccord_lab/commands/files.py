"""The output files of commands, and the errors if one cannot be written."""

from __future__ import annotations

from pathlib import Path

from oneaccord.errors import UsageError

__all__ = ["check_folder", "unwritable", "write_text"]


def check_folder(option: str, path: str | Path) -> None:
    """Find out before any work whether there is a folder for the file that an option names.

    Raises
    ------
    UsageError
        There is none.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path} cannot be written: there is no folder {folder}; name another file")


def write_text(option: str, path: str | Path, text: str) -> None:
    """Write the file that an option names.

    Raises
    ------
    UsageError
        It cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise unwritable(option, path, error) from None


def unwritable(option: str, path: str | Path, error: OSError) -> UsageError:
    """Return the error that says why the file that an option names cannot be written."""
    return UsageError(f"{option} {path} cannot be written: {error.strerror}; name another file")
