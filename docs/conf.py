"""Sphinx configuration."""

from mlaunch import __version__

project = "mlaunch"
author = "the developers of mlaunch"
version = release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_static_path: list[str] = []
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False
