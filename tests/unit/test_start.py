"""What a rank does before it joins the others."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.harness import ENV

# Page faults of a block that is taken for the second time, after a start on the device in argv.
FAULTS = """
import resource, sys
import torch
from drumline.dist.start import start

start(sys.argv[1], "gloo", 10.0)
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**24).fill_(1.0)  # 64 MiB, which are freed
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives freed memory back as it likes")
@pytest.mark.parametrize(("device", "kept"), [("cpu", True), ("meta", False)])
def test_memory_that_a_step_frees_is_there_for_the_next(device: str, kept: bool) -> None:
    """A rank that computes on the host keeps it; nobody else is changed."""
    done = subprocess.run([sys.executable, "-c", FAULTS, device], env=ENV, capture_output=True, text=True, check=True, timeout=120)
    assert (int(done.stdout) < 2**10) is kept, "64 MiB are 16,384 pages"
