"""Options of the whole suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.core import registry
from tests.harness import ENV

# What a test does in process may start processes, too: of rewards, which find `tests.harness:letters` by this alone. One thread, set
# before torch is imported: two workers with a thread a core each would wait for each other.
os.environ.update({name: ENV[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in ENV})


# Under `nohup` it is ignored, and so it would be by all that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


LONG = ("tests/hosts/", "tests/slurm/", "tests/faults/", "tests/distributed/", "tests/configs/")


@pytest.fixture(autouse=True)
def own_kinds_end_with_their_test() -> Iterator[None]:
    """What a test's config named as `path.py:Name` is no kind in the next test of the same process."""
    known = {base: dict(kinds) for base, kinds in registry._own.items()}
    yield
    registry._own.clear()
    registry._own.update(known)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-results",
        type=Path,
        default=None,
        help="write what the parity test measured to this JSON file",
    )
    parser.addoption(
        "--write-counts",
        action="store_true",
        help="write tests/fake_gpu/counts.json anew from what the rows do",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="also the tests marked `full`: what `make test-full` runs",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    results: Path | None = session.config.getoption("--parity-results")
    if results is not None and not hasattr(session.config, "workerinput"):
        results.unlink(missing_ok=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--full` a test that is marked so is left out."""
    if config.getoption("--full"):
        return
    out = [item for item in items if item.get_closest_marker("full")]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes have their argument's name as id: gzip writes the second into them, and workers must find the same tests."""
    return argname if isinstance(val, bytes) else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is one worker's, but for parity: there the rows of a process group are, so that workers share the longest file. Files of
    few and long tests come first: at the end one worker would wait for the other."""
    from xdist.scheduler import LoadFileScheduling

    from tests.distributed.rows import LOW, ROWS, group_of

    rows = {row.name: row for row in (*ROWS, *LOW)}

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            named = (
                [name for name in rows if test.partition("[")[2].startswith(name)]
                if file.endswith("/test_parity.py")
                else []
            )
            return f"{file}::{group_of(rows[max(named, key=len)])}" if named else file

        def _assign_work_unit(self, node: Any) -> None:
            if not any(self.assigned_work.values()):
                for scope in [each for each in self.workqueue if each.startswith(LONG)]:
                    self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            # A worker that replaces a crashed one may not have found its tests yet. It gets work when it has.
            if node in self.registered_collections:
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """Return the test that ended its worker, if one did. xdist would try it again, worker after worker."""
            units = self.assigned_work.pop(node)
            left = [
                test for unit in units.values() for test, is_done in unit.items() if not is_done
            ]
            if not left:
                return None
            for scope, unit in units.items():
                if left[0] in unit:
                    unit[left[0]] = True
                if not all(unit.values()):
                    self.workqueue[scope] = unit
            for other in self.assigned_work:
                self._reschedule(other)
            return left[0]

    return Files(config, log) if config.getoption("dist") == "loadfile" else None
