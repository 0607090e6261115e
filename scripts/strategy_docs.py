"""docs/strategies.md, and its Chinese twin, from the rules and from what the parity test measured: `python scripts/strategy_docs.py`.

First `python -m pytest tests/distributed/test_parity.py --full -n 2 --dist loadfile --parity-results benchmarks/results/parity-cpu.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drumline.core.matrix import as_markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "parity-cpu.json"
PAGES = {"en": ROOT / "docs" / "strategies.md", "zh": ROOT / "docs" / "strategies.zh.md"}
TEXT = {
    "en": """# Strategies

[中文](strategies.zh.md)

## What goes with what
This is for GPUs; `drumline strategies --device cpu` prints the same for a machine without any. A number is a reason
below. Such a run is refused before any process starts.

{matrix}

## What the parity test measured
Each number is the largest relative difference from one process with the same global batch in fp32: of losses, gradient
norms, weights and optimizer moments. {hardware}, torch {torch}, transformers {transformers}, {steps} steps,
commit {commit}.
`{command}`
""",
    "zh": """# 策略

[English](strategies.md)

## 什么可以组合
以下针对 GPU；`drumline strategies --device cpu` 打印没有 GPU 的机器上的结果。数字是下面的原因编号，原文与程序打印的一致；
这样的训练在启动任何进程之前就会被拒绝。

{matrix}

## 一致性测试测得的数值
每个数字是与单进程、相同全局 batch、fp32 相比的最大相对误差，取损失、梯度范数、权重和优化器动量中的最大值。
{hardware}，torch {torch}，transformers {transformers}，{steps} 步，
提交 {commit}。
`{command}`
""",
}


def page(measured: dict[str, Any], language: str) -> str:
    """The whole page, from the rules and the results of a parity run."""
    rows = measured["rows"]
    cases = list(dict.fromkeys(case for cases in rows.values() for case in cases))
    lines = [
        "<!-- made by scripts/strategy_docs.py: do not edit -->",
        TEXT[language].format(matrix=as_markdown("cuda"), **{key: value for key, value in measured.items() if key != "rows"}),
        "| strategy | " + " | ".join(cases) + " |",
        "|---|" + "---|" * len(cases),
    ]
    for name, by_case in rows.items():
        lines.append(f"| {name} | " + " | ".join(_largest(by_case.get(case)) for case in cases) + " |")
    return "\n".join(lines) + "\n"


def _largest(apart: dict[str, Any] | None) -> str:
    if apart is None:
        return ""
    return f"{max(apart[key] or 0.0 for key in ('loss', 'grad_norm', 'weights', 'moments')):.1e}"


if __name__ == "__main__":
    for language, path in PAGES.items():
        path.write_text(page(json.loads(RESULTS.read_text()), language))
        print(f"wrote {path}")
