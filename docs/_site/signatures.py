"""Long signatures: Sphinx makes the lines of their parameters a list of definitions without terms, which screen readers cannot read."""

from __future__ import annotations

import re
from typing import Any

LIST = re.compile(r"<dl>\n((?:<dd>(?:(?!</?dl>).)*?</dd>\n)+)</dl>", re.DOTALL)


def rewrite(_app: Any, _page: str, _template: str, context: dict[str, Any], _tree: Any) -> None:
    """Make each of these lines a span; site.css indents it."""
    if "body" in context:
        context["body"] = LIST.sub(lambda found: _spans(found[1]), context["body"])


def _spans(lines: str) -> str:
    return lines.replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("html-page-context", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
