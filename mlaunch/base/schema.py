"""The version of what programs read: each JSON object has it as ``schema``, and ``docs/schema.json`` the fields."""

from __future__ import annotations

VERSION = 1  # rises where a field goes or means something else; new ones may come without
