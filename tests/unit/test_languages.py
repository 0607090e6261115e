"""Each page in Chinese has the links and the commands of its English twin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.reference.__main__ import PAGES as GENERATED

ROOT = Path(__file__).parents[2]
# Pages that are made from the code have the language of its docstrings; Chinese pages mark links to them.
PAGES = [
    page.relative_to(ROOT).as_posix().removesuffix(".md")
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if not page.stem.endswith(".zh") and page.name not in GENERATED
]
TWINS = {"README.md": "README.zh-CN.md"} | {f"{page}.md": f"{page}.zh.md" for page in PAGES}


def links(text: str) -> set[str]:
    return {re.sub(r"\.zh(-CN)?\.md$", ".md", link) for link in re.findall(r"\]\(([^)#]+)", text)}


def commands(text: str) -> list[str]:
    """Lines of code without their comments, which are translated, as diagrams are."""
    text = re.sub(r"```mermaid\n.*?```", "", text, flags=re.DOTALL)
    fenced = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)).splitlines()
    lines = [
        line.split("#")[0].strip()
        for line in (*fenced, *re.findall(r"^    (.*)$", text, re.MULTILINE))
    ]
    return sorted(line for line in lines if line)


@pytest.mark.claim("pages say the same in both languages")
@pytest.mark.parametrize(("english", "chinese"), TWINS.items(), ids=TWINS)
def test_a_page_says_the_same_in_both_languages(english: str, chinese: str) -> None:
    one, other = ((ROOT / page).read_text() for page in (english, chinese))
    # Each page names its twin, by a link that the other has under its own name.
    assert links(one) - {Path(english).name} == links(other) - {Path(english).name}
    assert commands(one) == commands(other)
    assert one.count("\n## ") == other.count("\n## ") and one.count("\n### ") == other.count(
        "\n### "
    )


def test_chinese_pages_mark_links_to_english_pages() -> None:
    for page in sorted((ROOT / "docs").rglob("*.zh.md")):
        for link, mark in re.findall(r"\]\(([\w./]+)[^)]*\)(（英文）)?", page.read_text()):
            if Path(link).name in GENERATED:
                assert mark, f"{page}: {link} is English"


def test_relative_links_of_every_page_lead_to_a_file() -> None:
    broken = []
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_is_one_screen_and_its_links_lead_somewhere(page: str) -> None:
    """One table, one block of commands, a picture."""
    text = (ROOT / page).read_text()
    assert (
        len(text.splitlines()) <= 45
        and text.count("|---|") == 1
        and text.count("```") == 2
        and "\n## " not in text
    )
    named = [
        link
        for link in re.findall(r"\]\(([^)#]+)|(?:src|href)=\"([^\"]+)", text)
        for link in link
        if link
    ]
    assert named and all(link.startswith("https://") or (ROOT / link).is_file() for link in named)
