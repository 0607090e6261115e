"""The code of docs/guides/python.md runs as it stands, block after block, on a small model."""

from __future__ import annotations

import re
from pathlib import Path

from tests.forks import Forked
from tests.harness import ENV, ROOT, events, write_config
from tests.tiny import tiny_model_dir

PAGE = ROOT / "docs" / "guides" / "python.md"


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_page_runs(tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"), data={"packing": False})
    config.rename(tmp_path / "mine.yaml")
    page = blocks(PAGE)
    (mine,) = [block for block in page if block.startswith("# mine.py")]
    page.remove(mine)
    (tmp_path / "mine.py").write_text(mine)
    (tmp_path / "page.py").write_text("\n".join(page))
    env = {**ENV, "DRUMLINE_CACHE": str(tmp_path)}
    code, said = Forked("page", env=env, cwd=tmp_path).told(280)
    assert code == 0, said
    end = events(tmp_path / "runs" / "own", "run_end")[-1]
    assert end["exit_code"] == 0
    assert "strategy:" in said


def test_the_chinese_page_has_the_same_code() -> None:
    assert blocks(PAGE) == blocks(PAGE.with_name("python.zh.md"))
