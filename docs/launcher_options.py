"""A Sphinx directive that lists the options of ``launcher`` as their fields state them: ``.. launcher-options::``."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from mlaunch.caller.options import launch_options, option_text


class LauncherOptions(SphinxDirective):
    """Takes no arguments and no content."""

    def run(self) -> list[nodes.Node]:
        """Returns the definition list."""
        self.env.note_dependency(launch_options.__file__)
        parent = nodes.Element()
        self.state.nested_parse(StringList(option_text.definitions(), source=launch_options.__file__), 0, parent)
        return parent.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_directive("launcher-options", LauncherOptions)
    return {"parallel_read_safe": True}
