"""Each page in Chinese has the links and the commands of its English twin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.reference.__main__ import PAGES as GENERATED

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
TWINS = {"README.md": "README.zh-CN.md"}
for page in DOCS:
    # Pages that are made from the code have the language of its docstrings; Chinese pages mark
    # links to them.
    if not page.stem.endswith(".zh") and page.name not in GENERATED:
        name = page.relative_to(ROOT).as_posix().removesuffix(".md")
        TWINS[f"{name}.md"] = f"{name}.zh.md"


def links(text: str) -> set[str]:
    """Return the links of a page, those to Chinese pages as if to their English twins."""
    found = set()
    for link in re.findall(r"\]\(([^)#]+)", text):
        found.add(re.sub(r"\.zh(-CN)?\.md$", ".md", link))

    return found


def commands(text: str) -> list[str]:
    """Return lines of code without their comments, which are translated, as diagrams are."""
    text = re.sub(r"```mermaid\n.*?```", "", text, flags=re.DOTALL)
    lines = re.findall(r"^    (.*)$", text, re.MULTILINE)
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        lines += block.splitlines()

    found = []
    for line in lines:
        command = line.split("#")[0].strip()
        if command:
            found.append(command)

    return sorted(found)


@pytest.mark.claim("pages say the same in both languages")
@pytest.mark.parametrize(("english", "chinese"), TWINS.items(), ids=TWINS)
def test_a_page_says_the_same_in_both_languages(english: str, chinese: str) -> None:
    one = (ROOT / english).read_text()
    other = (ROOT / chinese).read_text()

    # Each page names its twin, by a link that the other has under its own name.
    own_name = {Path(english).name}
    assert links(one) - own_name == links(other) - own_name
    assert commands(one) == commands(other)
    for heading in ("\n## ", "\n### "):
        assert one.count(heading) == other.count(heading)


def test_chinese_pages_mark_links_to_english_pages() -> None:
    for page in DOCS:
        if not page.stem.endswith(".zh"):
            continue
        for link, mark in re.findall(r"\]\(([\w./]+)[^)]*\)(（英文）)?", page.read_text()):
            if Path(link).name in GENERATED:
                assert mark, f"{page}: {link} is English"


def test_relative_links_of_every_page_lead_to_a_file() -> None:
    broken = []
    for page in (*ROOT.glob("*.md"), *DOCS):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            is_relative = "://" not in link
            if is_relative and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")

    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_is_one_screen_and_its_links_lead_somewhere(page: str) -> None:
    """One table, one block of commands, a picture."""
    text = (ROOT / page).read_text()
    assert len(text.splitlines()) <= 45
    assert text.count("|---|") == 1
    assert text.count("```") == 2
    assert "\n## " not in text

    named = re.findall(r"\]\(([^)#]+)", text)
    named += re.findall(r"(?:src|href)=\"([^\"]+)", text)
    assert named
    for link in named:
        assert link.startswith("https://") or (ROOT / link).is_file()
