"""Holds what programs read of mlaunch against ``docs/schema.json``."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

from tests.conftest import ROOT

SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "schema.json").read_text())


def check(found: object, name: str) -> None:
    """Fail unless this is what the schema calls ``name``, with no field that it lacks."""
    try:
        validator = _validator(name)
    except ModuleNotFoundError:  # with other Pythons and torches than CI's
        return
    validator.validate(found)


@functools.cache
def _validator(name: str) -> Any:
    """Return what checks it: to check the schema itself takes longer than a hundred events."""
    import jsonschema

    definitions = copy.deepcopy(SCHEMA["$defs"])
    for one in definitions.values():
        if "properties" in one:
            one["additionalProperties"] = False
    schema = {"$ref": f"#/$defs/{name}", "$defs": definitions}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)
