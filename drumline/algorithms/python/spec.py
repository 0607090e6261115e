"""`algorithm: {kind: python, path: mine.py:objective}`. No torch at the top."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from drumline.config.algorithm import AlgorithmSpec, HeadOutput
from drumline.config.data import Forms
from drumline.config.registry import call_own, find_object
from drumline.config.section import PathText
from drumline.plan.plan import Plan

if TYPE_CHECKING:
    from drumline.algorithms.python.objective import PythonObjective


class PythonConfig(AlgorithmSpec):
    """A function (model, batch) → loss sum, or (loss sum, {name: sum}), for model.kind python. Sums are over the micro-batch."""

    position: ClassVar[int] = 50
    columns: ClassVar[str] = "what your objective takes"
    is_for_own_modules: ClassVar[bool] = True
    writes: ClassVar[bool] = False
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset()
    kind: Literal["python"] = "python"
    path: PathText = Field(
        description="file.py:function, relative to the YAML's folder, or package.module:function."
    )
    weight: PathText | None = Field(
        None,
        description="A function batch → what it adds to the loss's denominator; null: the number of its samples.",
    )
    collate: PathText | None = Field(
        None, description="A function: list of samples → batch; null: as torch's default_collate."
    )

    @property
    def forms(self) -> Forms:
        return ()

    def find(self, name: str, base_dir: Path) -> Any:
        """Return the function that a key names; None if it is not set. Raises ConfigError."""
        path = getattr(self, name)
        if path is None:
            return None
        return find_object(path, base_dir, f"algorithm.{name}", "function")

    def _find_checked(self, name: str, base_dir: Path) -> Callable[..., Any] | None:
        """Return the function that a key names; None if it is not set.

        Errors of the function name the key.
        """
        function = self.find(name, base_dir)
        if function is None:
            return None
        return partial(call_own, function, getattr(self, name), f"algorithm.{name}")

    def build_in(self, base_dir: Path) -> PythonObjective:
        from drumline.algorithms.python.objective import PythonObjective

        return PythonObjective(self.find("path", base_dir), self.path)

    def collator(
        self, plan: Plan, width: int | None
    ) -> Callable[[Any], Callable[[list[int]], Any]]:
        from drumline.data.samples import SampleCollator, default_collate_of

        base_dir = Path(plan.base_dir)
        collate = self._find_checked("collate", base_dir)
        weigh = self._find_checked("weight", base_dir)

        def collator_of(samples: Any) -> SampleCollator:
            return SampleCollator(samples, collate or default_collate_of(samples), weigh)

        return collator_of
