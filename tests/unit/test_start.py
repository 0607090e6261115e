"""What a rank does before it joins the others."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed.distributed_c10d as c10d
from torch.distributed import constants

from drumline.dist.start import M_MMAP_THRESHOLD, keep_freed_memory
from drumline.dist.timeouts import begin_timeouts, forget_timeouts
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
@pytest.mark.parametrize(
    ("device", "kept"), [("cpu", True), pytest.param("meta", False, marks=pytest.mark.full)]
)
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


def test_groups_made_after_a_run_have_the_limit_of_torch() -> None:
    begin_timeouts(41.0)
    assert c10d.default_pg_timeout == timedelta(seconds=41)
    forget_timeouts()
    assert c10d.default_pg_timeout == constants.default_pg_timeout


def test_an_old_glibc_gets_the_largest_threshold_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thresholds = []

    def mallopt(parameter: int, value: int) -> int:
        is_accepted = parameter != M_MMAP_THRESHOLD or value <= 32 << 20
        if is_accepted and parameter == M_MMAP_THRESHOLD:
            thresholds.append(value)
        return int(is_accepted)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    keep_freed_memory()
    assert thresholds == [32 << 20]
