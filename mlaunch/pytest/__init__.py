"""The pytest plugin: a test marked ``ranks`` runs on ranks that stay from test to test.

``plugin.py`` is all that pytest loads; the rest is imported with the first test that has the mark. Pytest's process
sets tests up and tears them down; what ``body.py`` names runs in the ranks.
"""

from __future__ import annotations

from mlaunch.pytest.rank_fixtures import rank_fixture

__all__ = ["rank_fixture"]
