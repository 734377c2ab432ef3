__version__ = "0.1.0"

# Of the JSON for programs, which has it as ``schema``: docs/schema.json. It rises when a field goes or means something
# else; new fields may come without.
SCHEMA = 1
