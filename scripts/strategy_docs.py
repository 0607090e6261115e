"""docs/reference/strategies.md and its Chinese twin, from the rules and from what the parity test measured.

Written by `python scripts/strategy_docs.py`.

First `python -m pytest tests/distributed/test_parity.py --full -n 2 --dist loadfile --parity-results benchmarks/results/parity-cpu.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drumline.planner.matrix import as_markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "parity-cpu.json"
PAGES = {
    "en": ROOT / "docs" / "reference" / "strategies.md",
    "zh": ROOT / "docs" / "reference" / "strategies.zh.md",
}
TEXT = {
    "en": """# Strategies

[简体中文](strategies.zh.md)

## What can be combined
This table is for GPUs; `drumline strategies --device cpu --markdown` prints the one for a machine without any. A number
names a reason below the table: such a run is refused before any process starts.

{matrix}

## What the parity test measured
Each strategy trained a few cases and was compared with one process, on the same global batch in fp32. The number is the
largest relative difference of losses, gradient norms, weights and optimizer moments over its cases; the last column is
the case that has it. Only moments differ by more than 1e-5.
[All numbers](../../benchmarks/results/parity-cpu.json): {hardware}, torch {torch}, transformers {transformers},
{steps} steps.
Commit {commit}.
`{command}`
""",
    "zh": """# 策略

[English](strategies.md)

## 什么可以组合
以下针对 GPU；`drumline strategies --device cpu --markdown` 打印没有 GPU 的机器上的结果。数字是下面的原因编号，原文与程序打印的一致；
这样的训练在启动任何进程之前就会被拒绝。

{matrix}

## 一致性测试测得的数值
每种策略训练若干情形，与单进程、相同全局 batch、fp32 的训练相比。数字是各情形中损失、梯度范数、权重和优化器矩的最大相对误差，
最后一列是出现它的情形。超过 1e-5 的只有矩。
[全部数值](../../benchmarks/results/parity-cpu.json)：{hardware}，torch {torch}，
transformers {transformers}，{steps} 步。
提交 {commit}。
`{command}`
""",
}


def page(measured: dict[str, Any], language: str) -> str:
    """The whole page, from the rules and the results of a parity run."""
    lines = [
        "<!-- made by scripts/strategy_docs.py: do not edit -->",
        TEXT[language].format(
            matrix=as_markdown("cuda"),
            **{key: value for key, value in measured.items() if key != "rows"},
        ),
        "| strategy | cases | largest difference | in |",
        "|---|---|---|---|",
    ]
    for name, by_case in measured["rows"].items():
        apart = {
            case: max(of[key] or 0.0 for key in ("loss", "grad_norm", "weights", "moments"))
            for case, of in by_case.items()
        }
        case, largest = max(apart.items(), key=lambda item: item[1])
        lines.append(f"| {name} | {len(by_case)} | {largest:.1e} | {case} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for language, path in PAGES.items():
        path.write_text(page(json.loads(RESULTS.read_text()), language))
        print(f"wrote {path}")
