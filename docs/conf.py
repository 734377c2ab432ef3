"""Sphinx configuration."""

import sys
from pathlib import Path

from mlaunch import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "mlaunch"
author = "the developers of mlaunch"
version = release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "launcher_options"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_static_path: list[str] = []
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False
