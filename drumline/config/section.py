"""The base class of all sections of the config, and the types of numbers and short forms in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from drumline.foreign import path_mistake

# The largest numbers that are accepted. A larger one is a typing error, and would overflow somewhere
# or make a run that never ends.
# Rows, tokens or samples of a step.
MOST_SAMPLES = 10**9
MOST_STEPS = 10**12
MOST_RANKS = 2**20
# Four months.
MOST_SECONDS = 10**7
MOST_SEED = 2**63 - 1
# Weight of a term of a loss or reward.
MOST_WEIGHT = 10**6


def _possible(path: str) -> str:
    """Return the path. Raises ValueError if no file can have it."""
    mistake = path_mistake(path)
    if mistake:
        raise ValueError(mistake)
    return path


# A path, or an id of a hub.
PathText = Annotated[str, AfterValidator(_possible)]
# Types of numbers by their range. Plug-ins use these names, too.
# A positive integer.
Count = Annotated[int, Field(gt=0, le=MOST_SAMPLES)]
# An integer that may be 0.
Amount = Annotated[int, Field(ge=0, le=MOST_SAMPLES)]
# A fraction of a whole, neither none nor all of it.
Part = Annotated[float, Field(gt=0, lt=1)]
# A positive number with a unit, such as hours, GB or epochs.
Rate = Annotated[float, Field(gt=0, le=MOST_SAMPLES)]
# A positive number of ranks.
Ranks = Annotated[int, Field(gt=0, le=MOST_RANKS)]
# A positive number of steps.
Steps = Annotated[int, Field(gt=0, le=MOST_STEPS)]
# A positive number of seconds.
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
# A coefficient of a term of a loss or reward, which may be 0.
Weight = Annotated[float, Field(ge=0, le=MOST_WEIGHT)]
# A positive coefficient.
Above0 = Annotated[float, Field(gt=0, le=MOST_WEIGHT)]


def passes(every: int | str | None) -> float | None:
    """Return the passes over the data of `N epochs`; None for anything else."""
    match = re.fullmatch(r"(\d*\.?\d+) *epochs?", str(every))
    if match is None:
        return None
    return float(match[1])


def _epochs(every: str) -> str:
    """Return the text. Raises ValueError if it is no number of epochs."""
    epochs = passes(every)
    if epochs is None or not 0 < epochs <= MOST_SAMPLES:
        raise ValueError(
            f"{every!r} given, a number of steps or of epochs is wanted: 200, or `0.5 epochs`"
        )
    return every


Epochs = Annotated[str, AfterValidator(_epochs)]


class Frozen(BaseModel):
    """A part of a plan: frozen, and closed to keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Section(BaseModel):
    """A part of the config: frozen, and closed to keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=False)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema. Keys that null leaves at their default have null among their values."""
        json_schema = handler(schema)
        properties = handler.resolve_ref_schema(json_schema).get("properties", {})
        for name, info in cls.model_fields.items():
            if name in properties and null_means_default(info):
                properties[name] = _or_null(properties[name])
        return json_schema


@dataclass(frozen=True)
class RefusesNull:
    """Metadata of a key that refuses null, since it is unclear whether null means off or the default.

    `fix` says what to write for either.
    """

    fix: str


def null_means_default(field: FieldInfo) -> bool:
    """Return whether null at a key means its default.

    It does if the type has no null, except for a `kind` that selects its section, and for keys that
    are marked `RefusesNull`.
    """
    if field.is_required() or _admits_null(field.annotation):
        return False
    selects_section = (
        get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    )
    return not selects_section and refusal_of_null(field) is None


def refusal_of_null(field: FieldInfo) -> RefusesNull | None:
    """Return why null is refused at a key; None if no reason is listed."""
    for part in field.metadata:
        if isinstance(part, RefusesNull):
            return part
    return None


def _admits_null(annotation: Any) -> bool:
    """Return whether null is a value of a type, unions in unions included."""
    if annotation in (None, NoneType, Any):
        return True
    if get_origin(annotation) is Literal:
        return None in get_args(annotation)
    is_alternative = get_origin(annotation) in (Union, UnionType, Annotated)
    return is_alternative and any(_admits_null(part) for part in get_args(annotation))


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a key, with null added to its values."""
    about: dict[str, Any] = {
        key: schema[key] for key in ("description", "title", "default") if key in schema
    }
    values = {key: value for key, value in schema.items() if key not in about}
    choices = [values]
    if list(values) == ["anyOf"]:
        choices = values["anyOf"]
    return {"anyOf": [*choices, {"type": "null"}], **about}


@dataclass(frozen=True)
class Short:
    """A short form of a section.

    Attributes:
        long: Returns the section for its short form.
        short_schema: JSON schema of the short form; None if that is a kind of the section, as text.
    """

    long: Callable[[Any], Any]
    short_schema: dict[str, Any] | None = field(default=None, hash=False)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.long, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        full = handler(schema)
        short = self.short_schema or {"enum": sorted(kinds_without_keys(full, handler))}
        return {"anyOf": [short, full]}


def kinds_without_keys(full: dict[str, Any], handler: GetJsonSchemaHandler) -> list[str]:
    """Return the kinds of a section that need no further key. `full` is the section's JSON schema."""
    kinds: list[str] = []
    if "discriminator" in full:
        for reference in full["discriminator"]["mapping"].values():
            kinds += kinds_without_keys({"$ref": reference}, handler)
        return kinds
    section = handler.resolve_ref_schema(full)
    required = set(section.get("required", ()))
    if required - {"kind"}:
        return []
    kind = section["properties"]["kind"]
    # null is among the choices if it means the default.
    for choice in kind.get("anyOf", [kind]):
        if choice.get("type") != "null":
            kinds += choice.get("enum", [choice.get("const")])
    return kinds


def _as_kind(value: Any) -> Any:
    """Return the section that a kind is short for: `ddp` means `{kind: ddp}`."""
    if isinstance(value, str):
        return {"kind": value}
    return value


KIND_ALONE = Short(_as_kind)
