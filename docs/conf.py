"""The site of oneaccord: how Sphinx makes it from docs/ and from the docstrings. `make docs` is the way to run it."""

from __future__ import annotations

import sys
from pathlib import Path

from oneaccord import __version__

sys.path.insert(0, str(Path(__file__).parent / "_site"))

project = "oneaccord"
author = "the oneaccord developers"
version = release = __version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "diagrams",  # _site/diagrams.py: pictures of the diagrams that are written in Mermaid
    "generated",  # _site/generated.py: what is made from the code
    "outside",  # _site/outside.py: links to files outside docs/, and to names
    "signatures",  # _site/signatures.py: long signatures as lines
    "texts",  # _site/texts.py: the words around a search result
]
exclude_patterns = ["_site"]

# Markdown
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
# A tab of a name opens all tabs of that name, on each page.
sd_fontawesome_latex = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

# Docstrings: a name in single backquotes is a link to it.
default_role = "py:obj"
numpydoc_show_class_members = False
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
# The layers of torch and JAX are described without either of them.
autodoc_mock_imports = ["jax", "torch"]
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

# The pages. All that they need comes with them, and they work from a folder: no page asks a server for anything.
html_theme = "pydata_sphinx_theme"
html_title = "oneaccord"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_search_scorer = str(Path(__file__).parent / "_site" / "scorer.js")
html_copy_source = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_sidebars = {"**": ["sidebar-nav-bs"], "index": [], "coming-from": []}
html_theme_options = {
    "logo": {"text": f"oneaccord {version}", "alt_text": "oneaccord: first page"},
    "search_as_you_type": True,
    "search_bar_text": "Search",
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "navbar_end": ["theme-switcher"],
    "show_toc_level": 2,
    "navigation_depth": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_show_copyright = False
html_show_sphinx = False
