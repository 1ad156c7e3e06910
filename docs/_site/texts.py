"""The text of each page as a script, for the words around a search result: without a server, a page can load scripts and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes


def write(app: Any, page: str, _template: str, _context: Any, tree: Any) -> None:
    """Write the text of a page beside the pages, with the anchors of its sections, which the search looks for."""
    if tree is None:
        return
    parts = [_text(section) for section in tree.findall(nodes.section)]
    html = f'<div role="main">{"".join(parts)}</div>'
    target = Path(app.outdir) / "_texts" / f"{page}.js"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"oneaccordText({json.dumps(page)}, {json.dumps(html)});\n", encoding="utf-8")


def _text(section: Any) -> str:
    own = " ".join(child.astext() for child in section.children if not isinstance(child, nodes.section))
    escaped = own.replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f'<div id="{name}">' for name in section["ids"][:1]) + f"{escaped}</div>\n"


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("html-page-context", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
