"""Sphinx configuration."""

import sys
from pathlib import Path

from mlaunch import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "mlaunch"
author = "the mlaunch developers"
copyright = f"2026, {author}"
version = release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "launcher_options", "measured", "units"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"mlaunch {version}"
html_static_path = ["static"]
html_css_files = ["pages.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False
