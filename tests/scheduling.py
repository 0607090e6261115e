"""Which worker runs which tests when several run the suite."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

from tests.distributed.rows import LOW, ROWS, group_of

# Folders of few and long tests. They come first: at the end one worker would wait for the other.
LONG = (
    "tests/fake_gpu/",
    "plugins/diloco/",
    "plugins/hosts/",
    "plugins/kubernetes/",
    "plugins/sweep/tests/test_trials",
    "plugins/sweep/tests/test_slurm",
    "tests/hosts/",
    "tests/slurm/",
    "tests/servers/",
    "tests/faults/",
    "tests/distributed/",
    "tests/configs/",
)
PARITY_ROWS = {row.name: row for row in (*ROWS, *LOW)}


class Files(LoadFileScheduling):
    """Gives a worker all tests of a file; of the parity test, which is the longest, all rows of a process group."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if not file.endswith("/test_parity.py"):
            return file
        row_and_rest = test.partition("[")[2]
        names = [name for name in PARITY_ROWS if row_and_rest.startswith(name)]
        if not names:
            return file
        longest = max(names, key=len)
        return f"{file}::{group_of(PARITY_ROWS[longest])}"

    def _assign_work_unit(self, node: Any) -> None:
        nothing_has_begun = not any(self.assigned_work.values())
        if nothing_has_begun:
            for scope in list(self.workqueue):
                if scope.startswith(LONG):
                    self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        # A worker that replaces a crashed one may not have found its tests yet. It gets work when it has.
        if node in self.registered_collections:
            super()._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Return the test that ended its worker, if one did. xdist itself would try it again, worker after worker."""
        units = self.assigned_work.pop(node)
        left = [test for unit in units.values() for test, is_done in unit.items() if not is_done]
        if not left:
            return None
        crashed = left[0]
        for scope, unit in units.items():
            if crashed in unit:
                unit[crashed] = True
            if not all(unit.values()):
                self.workqueue[scope] = unit
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed
