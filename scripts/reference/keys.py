"""The page of all keys of the YAML, from its JSON Schema."""

from __future__ import annotations

import json
from typing import Any

from drumline.config.load import schema as json_schema
from scripts.reference.markdown import cell, code, links_to, paragraph, table

Schema = dict[str, Any]
# A larger upper limit only catches a slip of the keyboard, so it is not shown.
LARGEST_SHOWN = 1e5
HEAD = """# YAML keys

Every key of the YAML: its type, its default, and what it does. `drumline schema` prints the same as a JSON Schema,
with which an editor completes and checks keys.

- A section may be left out. `null` at a key means its default, unless the table gives `null` a meaning.
- On the command line a key is written with dots: `drumline train mine.yaml optimizer.lr=1e-4`.
- A section with a `kind` has a table for each kind. `strategy: ddp` is short for `strategy: {kind: ddp}`.
- A kind may also be code of your own, as `path.py:Name` or `package.module:Name` ([Python](../guides/python.md)).

"""


def keys_page() -> str:
    """Return the page."""
    return KeysPage(json_schema()).text()


class KeysPage:
    """Walks the schema from the top-level sections down; a section that is used twice is printed once."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.definitions: dict[str, Schema] = schema["$defs"]
        self.headings: dict[str, str] = {}  # definition → the heading that it stands below
        self.parts: list[str] = []

    def text(self) -> str:
        """Return the whole page: a list of the sections, then each with its tables."""
        properties: dict[str, Schema] = self.schema["properties"]
        for name, section in properties.items():
            self.parts.append(f"## {name}\n")
            if "description" in section:
                self.parts.append(paragraph(section["description"]) + "\n")
            shorts = self.short_forms(section)
            if shorts:
                self.parts.append(paragraph(f"Short forms: {shorts}.") + "\n")
            self.add_sections(name, section)
        page = HEAD + links_to(list(properties)) + "\n\n" + "\n".join(self.parts)
        for definition, heading in self.headings.items():
            anchor = heading.replace(": ", "-").replace(".", "").replace(", ", "-")
            page = page.replace(_link_mark(definition), f"[section](#{anchor})")
        return page

    def short_forms(self, section: Schema) -> str:
        """Return what may stand in place of a section's keys, as text; empty if nothing may."""
        values = []
        for choice in section.get("anyOf", []):
            if "enum" in choice:
                values += [code(_yaml(value)) for value in choice["enum"]]
            for example in choice.get("examples", []):
                values.append(code(example))
        return ", ".join(values)

    def add_sections(self, path: str, schema: Schema) -> None:
        """Add a table for each section that may stand at a path, and for the sections in it."""
        names = self.referenced(schema)
        for name in names:
            if name in self.headings:
                continue
            heading = path
            kind = self.kind_of(name)
            if kind and len(names) > 1:
                heading = f"{path}: {kind}"
            self.headings[name] = heading
            self.add_table(path, heading, name)

    def add_table(self, path: str, heading: str, name: str) -> None:
        """Add the table of one section, then those of the sections in it."""
        definition = self.definitions[name]
        rows = []
        required = definition.get("required", [])
        nested: list[tuple[str, Schema]] = []
        for key, value in definition.get("properties", {}).items():
            if key == "kind" and "const" in value:
                continue
            default = self.default_text(value, is_required=key in required)
            meaning = cell(value.get("description", ""))
            rows.append([code(key), self.type_text(value), default, meaning])
            if self.referenced(value):
                nested.append((f"{path}.{key}", value))
        if heading != path or "." in path:
            self.parts.append(f"### {heading}\n")
        if rows:
            self.parts.append(table(["key", "type", "default", "meaning"], rows))
        else:
            self.parts.append("No keys.\n")
        for nested_path, value in nested:
            self.add_sections(nested_path, value)

    def kind_of(self, name: str) -> str | None:
        """Return the `kind` that selects a section; None if it has none."""
        kind = self.definitions[name].get("properties", {}).get("kind", {})
        if "const" in kind:
            return str(kind["const"])
        if "enum" in kind:
            return ", ".join(kind["enum"])
        return None

    def referenced(self, schema: Any) -> list[str]:
        """Return the names of the sections that may stand at a key, in their order."""
        names: list[str] = []
        if isinstance(schema, dict):
            if "$ref" in schema:
                names.append(schema["$ref"].rsplit("/", 1)[1])
            for key, value in schema.items():
                if key not in ("$ref", "discriminator", "not"):
                    names += self.referenced(value)
        elif isinstance(schema, list):
            for value in schema:
                names += self.referenced(value)
        return list(dict.fromkeys(names))

    def default_text(self, schema: Schema, *, is_required: bool) -> str:
        """Return the default of a key as YAML."""
        if is_required:
            return "required"
        if "default" in schema:
            return code(_yaml(schema["default"]))
        if self.referenced(schema):
            return "its defaults"
        # A default that a function makes is not in the schema.
        types = {choice.get("type") for choice in schema.get("anyOf", [schema])}
        if "array" in types:
            return code("[]")
        if "object" in types:
            return code("{}")
        return "automatic"

    def type_text(self, schema: Schema) -> str:
        """Return the type of a key in words, with its limits."""
        kinds = list(dict.fromkeys(self.alternatives(schema)))
        means_default = "default" in schema and schema["default"] is not None
        if (means_default or "default" not in schema) and len(kinds) > 1:
            kinds = [kind for kind in kinds if kind != "`null`"]
        return " or ".join(kinds)

    def alternatives(self, schema: Schema) -> list[str]:
        """Return each type that a key may have, in words."""
        if "discriminator" in schema:  # a section with kinds: the first one stands for all
            return self.alternatives(schema["oneOf"][0])
        for union in ("anyOf", "oneOf"):
            if union in schema:
                found = []
                for choice in schema[union]:
                    found += self.alternatives(choice)
                return found
        if "$ref" in schema:
            return [_link_mark(schema["$ref"].rsplit("/", 1)[1])]
        if "const" in schema:
            return [code(_yaml(schema["const"]))]
        if "enum" in schema:
            return [", ".join(code(_yaml(value)) for value in schema["enum"])]
        if schema.get("pattern") == ":":
            return ["`path.py:Name`"]
        kinds = schema.get("type", "any")
        if isinstance(kinds, str):
            kinds = [kinds]
        return [self.plain_type(kind, schema) for kind in kinds]

    def plain_type(self, kind: str, schema: Schema) -> str:
        """Return a type that is neither a union nor a section in words."""
        if kind in ("integer", "number"):
            return f"{kind}{_limits(schema)}"
        if kind == "array":
            items = " or ".join(dict.fromkeys(self.alternatives(schema.get("items", {}))))
            return f"list of {items}"
        if kind == "object":
            values = schema.get("additionalProperties")
            if isinstance(values, dict):
                return f"mapping of text to {' or '.join(self.alternatives(values))}"
            return "mapping"
        return {"string": "text", "boolean": "`true`, `false`", "null": "`null`"}.get(kind, kind)


def _limits(schema: Schema) -> str:
    """Return the limits of a number in words: ` from 1 to 64`, ` > 0`. Very large ones are left out."""
    low = schema.get("minimum")
    high = schema.get("maximum")
    if high is not None and high >= LARGEST_SHOWN:
        high = None
    if low is not None and high is not None:
        return f" from {low} to {high}"
    limits = {
        "≥": low,
        ">": schema.get("exclusiveMinimum"),
        "<": schema.get("exclusiveMaximum"),
        "≤": high,
    }
    words = [f"{sign} {limit}" for sign, limit in limits.items() if limit is not None]
    if not words:
        return ""
    return f" {' and '.join(words)}"


def _link_mark(definition: str) -> str:
    """Return what stands for the link to a section until it is known under which heading it is."""
    return "{" + definition + "}"


def _yaml(value: object) -> str:
    """Return a value as it is written in YAML, on one line."""
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, ensure_ascii=False)
