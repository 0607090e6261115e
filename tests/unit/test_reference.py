"""The reference pages in docs/ are what the code says now."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness import ROOT


@pytest.mark.slow
def test_the_reference_pages_are_up_to_date() -> None:
    # In a process of its own: what other tests have imported could change a signature's text.
    done = subprocess.run(
        [sys.executable, "-m", "scripts.reference", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_name_every_section_command_and_event() -> None:
    keys = (ROOT / "docs" / "reference" / "keys.md").read_text()
    commands = (ROOT / "docs" / "reference" / "commands.md").read_text()
    events = (ROOT / "docs" / "reference" / "events.md").read_text()
    assert "\n### strategy: fsdp2\n" in keys
    assert "| `global_samples` |" in keys
    assert "\n## train\n" in commands
    assert "`--resume [PATH]`" in commands
    assert "\n## rollout\n" in events
    assert "| `sampler_gap` |" in events
