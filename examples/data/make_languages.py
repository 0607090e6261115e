"""Writes languages.jsonl beside this file: sentences of nine languages with their language, for `examples/languages_bert.yaml`.

They are from the ChatterBot corpus (Gunther Cox and contributors; BSD licence): `pip install --no-deps chatterbot-corpus==1.3.3`.
"""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path

import yaml

LANGUAGES = (
    "dutch",
    "english",
    "french",
    "german",
    "indonesian",
    "italian",
    "portuguese",
    "spanish",
    "turkish",
)
MOST, SHORTEST, LONGEST = 250, 12, 120  # sentences of a language; letters of a sentence


def sentences(folder: Path) -> list[str]:
    """All different ones, in the order of the files."""
    found: dict[str, None] = {}
    for path in sorted(folder.glob("*.yml")):
        for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"] or ():
            found |= {" ".join(str(said).split()): None for said in conversation}
    return [text for text in found if SHORTEST <= len(text) <= LONGEST]


def main() -> None:
    spec = find_spec("chatterbot_corpus")
    assert spec is not None and spec.origin is not None, (
        "pip install --no-deps chatterbot-corpus==1.3.3"
    )
    by_language = {name: sentences(Path(spec.origin).parent / "data" / name) for name in LANGUAGES}
    draw = random.Random(0)
    rows = [
        {"text": text, "label": name}
        for name, texts in by_language.items()
        for text in draw.sample(texts, min(MOST, len(texts)))
        if sum(text in others for others in by_language.values()) == 1
    ]
    draw.shuffle(rows)
    path = Path(__file__).parent / "languages.jsonl"
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
