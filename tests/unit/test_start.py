"""What a rank does before it joins the others."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.harness import ENV

# Page faults of a block of 32 MiB, after one of 64 that was freed, in a process that has started on the device in argv.
FAULTS = """
import resource, sys
import torch
from drumline.dist.start import start

start(sys.argv[1], "gloo", 10.0)
for size in (2**24, 2**23):  # the second finds room where the first was, whatever small came between
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(size).fill_(1.0)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc",
    reason="another C library gives freed memory back as it likes",
)
@pytest.mark.parametrize(("device", "kept"), [("cpu", True), ("meta", False)])
@pytest.mark.slow
def test_memory_that_a_step_frees_is_there_for_the_next(device: str, kept: bool) -> None:
    """A rank that computes on the host keeps it; nobody else is changed."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, device],
        env=ENV,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert (int(done.stdout) < 2**10) is kept, "32 MiB are 8,192 pages"
