"""Configuration of the documentation site; `make docs` builds it."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dadplug  # noqa: E402  (needs the path)

project = "dadplug"
author = "dadplug maintainers"
copyright = "2026, dadplug maintainers"
version = release = dadplug.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"dadplug {release}"
html_static_path: list[str] = []
html_copy_source = False
html_theme_options = {
    "source_repository": "",
    "light_css_variables": {"content-padding": "2.5rem"},
}

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4  # a heading links as on a forge: page.md#its-words-in-lower-case
myst_links_external_new_tab = False

# Docstrings are in Google's style; single backticks in them are code.
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# With -n every reference has to lead somewhere. Types in signatures are the exception: those of torch, of the trainers
# and of Python have their entries on other sites, which are not downloaded here.
nitpick_ignore_regex = [("py:.*", ".*")]


def escape_asterisks(app: Sphinx, what: str, name: str, target: Any, options: Any, lines: list[str]) -> None:
    """Escape asterisks outside of code, such as those of `*shape`, which would begin emphasised text."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...", "* ")):
            parts = re.split(r"(``.*?``|`.*?`)", line)
            lines[number] = "".join(each if each.startswith("`") else each.replace("*", r"\*") for each in parts)


def cell_as_markdown(source: str, outputs: list[dict[str, Any]]) -> str:
    """Convert a code cell of a notebook with its outputs: text as a block, pictures into the page."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%writefile "):
        parts = [f"```{{code-block}} python\n:caption: {first.split()[1]}\n\n{rest}\n```"]
    else:
        parts = [f"```{'console' if source.startswith('!') else 'python'}\n{source}\n```"]
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            parts.append(f'<img src="data:image/png;base64,{"".join(data["image/png"]).strip()}" alt="output" />')
        elif text := "".join(output.get("text", data.get("text/plain", []))):
            parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


class NotebookParser(MystParser):
    """Parser of notebooks with their outputs; `make notebooks` executes them."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        parts = []
        for cell in json.loads(inputstring)["cells"]:
            source = "".join(cell["source"])
            parts.append(cell_as_markdown(source, cell["outputs"]) if cell["cell_type"] == "code" else source)
        super().parse("\n\n".join(parts), document)


def setup(app: Sphinx) -> None:
    """Connect what this site adds to Sphinx."""
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-docstring", escape_asterisks, priority=400)  # before napoleon
