"""A Sphinx extension that keeps a number and its unit in one line, "150 ms", also where the source breaks it."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

UNIT = re.compile(r"(?<=\d)[ \n](?=(?:[nmµ]?s|min|h|[KMGT]i?B|%|seconds?|minutes?|milliseconds|microseconds|times)\b)")


def keep_together(_app: Sphinx, document: nodes.document) -> None:
    """Put a space that does not break between them, everywhere but in code."""
    for text in list(document.findall(nodes.Text)):
        if not isinstance(text.parent, (nodes.literal, nodes.FixedTextElement)) and UNIT.search(text):
            text.parent.replace(text, nodes.Text(UNIT.sub("\N{NO-BREAK SPACE}", text)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("doctree-read", keep_together)
    return {"parallel_read_safe": True}
