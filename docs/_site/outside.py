"""Links that Markdown alone does not resolve: to a file of the repository outside docs/, and to a name of the API.

The file comes with the site, as text that a browser shows. A name is an anchor on the page that describes it: ``api.md#oneaccord.Group``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

LOG = logging.getLogger(__name__)
FOLDER = "_files"


class LinksToFiles(SphinxPostTransform):
    """Turns links to files outside docs/ into links to copies; runs before MyST looks for pages of these names."""

    default_priority: ClassVar[int] = 5

    def run(self, **_options: Any) -> None:
        """Turn the links of one page."""
        for node in [*self.document.findall(addnodes.pending_xref), *self.document.findall(addnodes.download_reference)]:
            if isinstance(node, addnodes.pending_xref) and node.get("reftype") not in {"myst", "doc"}:
                continue
            self._turn(node)

    def _turn(self, node: Any) -> None:
        source = Path(self.app.srcdir)
        page = self.env.docname
        name, _, anchor = str(node.get("reftarget", "")).partition("#")
        anchor = anchor or node.get("reftargetid") or ""
        if anchor in self.env.domains.python_domain.objects:
            described = self.env.domains.python_domain.objects[anchor]
            uri = self.app.builder.get_relative_uri(page, described.docname)
            node.replace_self(nodes.reference("", "", *node.children, refuri=f"{uri}#{described.node_id}", internal=True))
            return
        path = Path(os.path.normpath((source / page).parent / name))
        if path.with_name(f"{path.name}.md").exists():  # MyST takes the suffix of a page away
            path = path.with_name(f"{path.name}.md")
        if not name or path == source or source in path.parents or source.parent not in path.parents:
            return
        place = path.relative_to(source.parent).as_posix()
        if path.is_dir():
            node.replace_self(nodes.inline("", "", *node.children))
            return
        if not path.exists():
            LOG.warning("the page links to %s, which is not there", place, location=node, type="outside")
            return
        copy = Path(self.app.outdir) / FOLDER / f"{place}.txt"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        up = "../" * page.count("/")
        node.replace_self(nodes.reference("", "", *node.children, refuri=f"{up}{FOLDER}/{place}.txt", internal=True))


def setup(app: Any) -> dict[str, bool]:
    """Add the transform to Sphinx."""
    app.add_post_transform(LinksToFiles)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
