"""What the plots of several commands share; matplotlib is imported only here, and only when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from manyhands.common.installing import install_command
from manyhands.drawing.labels import PALETTE
from manyhands.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_name", "line_look", "new_figure", "save_figure"]

_FORMATS: Final[tuple[str, ...]] = (".svg", ".png")
_MARKERS: Final[str] = "osD^vP*X"


def check_name(path: Path) -> None:
    """Refuse a file's name that does not end with .svg or .png.

    Raises
    ------
    UsageError
        It ends otherwise.
    """
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"--plot {path}: the name ends with {path.suffix!r}, and expected is {' or '.join(_FORMATS)}")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches.

    Raises
    ------
    UsageError
        matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        command = install_command("pip install 'manyhands[plot]'")
        raise UsageError(f"--plot needs matplotlib ({error}); try: {command}") from None
    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained", facecolor="white")


def line_look(position: int) -> dict[str, Any]:
    """Return colour and marker of the line with this number, and what all lines have alike."""
    return {
        "color": PALETTE[position % len(PALETTE)],
        "marker": _MARKERS[position % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.6,
    }


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure to a file.

    Raises
    ------
    ConfigError
        It cannot be written.
    """
    import matplotlib as mpl

    try:
        # Without the date, and with ids that do not come from chance: the same plot has the same bytes.
        with mpl.rc_context({"svg.hashsalt": "manyhands", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", file="argument", value=str(path)) from None
