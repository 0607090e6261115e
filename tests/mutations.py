"""Mistakes of one line, each put into a copy of the tree, and the tests that must notice it.

    python -m tests.mutations [NAME...]      (make mutations)

A mistake that no test notices exits with 1: then a claim has lost its proof.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.harness import ENV, ROOT, source_path

SECONDS = 500  # for the tests of one mistake
PARITY = "tests/distributed/test_parity.py::test_same_numbers_as_one_process"


@dataclass(frozen=True)
class Mutation:
    """`file` with `line` as `wrong`; the first of `tests` (node ids) to fail notices it.

    `file` is in drumline/, or in plugins/ if it begins so.
    """

    name: str
    file: str
    line: str
    wrong: str
    tests: tuple[str, ...]

    def path_in(self, tree: Path) -> Path:
        if self.file.startswith("plugins/"):
            return tree / self.file
        return tree / "drumline" / self.file


MUTATIONS = [
    Mutation(
        "a rank divides by its own tokens", "train/loop.py",
        "weight, tokens = batch.totals or self._sum_weight_and_tokens(batch)",
        "weight, tokens = sum(float(b.weight) for b in batch.micro_batches), 1.0",
        (f"{PARITY}[ddp 2, accumulation 4-clipped hard]",),
    ),
    Mutation(
        "a sum is taken for a mean", "engine/native.py",
        "self.loss_scale.scale(self.averaged_over / denominator)", "self.loss_scale.scale(1 / denominator)",
        (f"{PARITY}[ddp 2, accumulation 4-clipped hard]",),
    ),
    Mutation(
        "what the user says is learned", "data/batches.py",
        "learn[1:] != 0, next_tokens", "learn[1:] >= 0, next_tokens",
        ("tests/unit/test_data_packing.py::test_collate_shifts_within_segments_and_restarts_positions",),
    ),
    Mutation(
        "what an environment says is learned", "data/batches.py",
        "learn[len(prompt) :] = episodes.sampled[pick]", "learn[len(prompt) :] = 1",
        ("tests/unit/test_conversations.py::test_targets_are_the_sampled_tokens",),
    ),
    Mutation(
        "a document sees the one before", "data/batches.py",
        "positions[index, start:] = np.arange(width - start)", "positions[index, start:] = start + np.arange(width - start)",
        ("tests/unit/test_data_packing.py::test_collate_shifts_within_segments_and_restarts_positions",),
    ),
    Mutation(
        "packs hold more than fits", "data/packing.py",
        "at = bisect_left(rooms, size)", "at = bisect_left(rooms, size - 1)",
        ("tests/unit/test_data_packing.py::test_pack_groups_every_row_once_within_the_capacity",),
    ),
    Mutation(
        "a resumed run starts its data anew", "train/build.py",
        "loaders = source.data_loaders_from(state.position, is_new)",
        "loaders = source.data_loaders_from(0, is_new)",
        ("tests/distributed/test_resume_pairs.py::test_goes_on_under_another[ddp 2 to fsdp2 2]",),
    ),
    Mutation(
        "every rank gets the first one's samples", "data/order.py",
        "indices_of_rank = assigned[self.data_rank]", "indices_of_rank = assigned[0]",
        ("tests/unit/test_data_stream.py::test_any_split_takes_the_same_samples_each_step",),
    ),
    Mutation(
        "a step's random numbers are those of another", "dist/seeds.py",
        "value = derive(seed, step, *stream)", "value = derive(seed, *stream)",
        ("tests/unit/test_loop.py::test_random_numbers_depend_on_seed_step_and_rank_alone",),
    ),
    Mutation(
        "tensor parallelism forgets to add a gradient up", "engine/tensor_parallel.py",
        "_redistribute(weight, mesh, Replicate(), Replicate(), Partial())", "_redistribute(weight, mesh, Replicate(), Replicate())",
        ("tests/distributed/test_tensor_parallel.py::test_same_gradients_as_in_one_process[norms between]",),
    ),
    Mutation(
        "every micro-batch but the last is lost", "engine/data_parallel.py",
        "self.fsdp.set_requires_gradient_sync(last or self.sync_each_micro_batch)",
        "self.fsdp.set_requires_gradient_sync(not last)",
        (f"{PARITY}[fsdp2 2, accumulation 4-lora]",),
    ),
    Mutation(
        "the norm is clipped to its square", "engine/native.py",
        "(self.max_grad_norm / (grad_norm + CLIP_EPSILON)).clamp(max=1.0)",
        "(self.max_grad_norm / (grad_norm + CLIP_EPSILON) ** 2).clamp(max=1.0)",
        ("tests/unit/test_native.py::test_clipping_scales_the_gradient",),
    ),
    Mutation(
        "the larger of two surrogates", "algorithms/policy.py",
        "loss_BT = -torch.minimum(free_BT, bounded_BT)", "loss_BT = -torch.maximum(free_BT, bounded_BT)",
        ("tests/unit/test_grpo.py::test_losses_and_gradients_equal_trl", "tests/unit/test_ppo.py"),
    ),
    Mutation(
        "k3 with a wrong sign", "algorithms/policy.py",
        "torch.expm1(exponent) + log_ratio", "torch.expm1(exponent) - log_ratio",
        ("tests/unit/test_grpo.py::test_divergence_estimators",),
    ),
    Mutation(
        "a value goes on behind the end of a completion", "algorithms/credit.py",
        "next_value_N = torch.where(mask_N, value_N, next_value_N)", "next_value_N = value_N",
        ("tests/unit/test_ppo.py::test_gae_is_the_sum_of_discounted_errors",),
    ),
    Mutation(
        "fillers count as pairs", "algorithms/pairs.py",
        "(loss_P * real_P).sum()", "loss_P.sum()",
        ("tests/unit/test_preferences.py::test_dpo",),
    ),
    Mutation(
        "a changed manifest is believed", "checkpoint/manifest.py",
        'if outer["sha256"] != json_digest(content):', "if False:",
        ("tests/faults/test_checkpoint_damage.py::test_a_changed_manifest",),
    ),
    Mutation(
        "a checkpoint has its name before it is whole", "checkpoint/save.py",
        'self.root / self.ranks.run_on_rank_0(make_name)',
        "self.root / folder_name(job.step)",
        ("tests/unit/test_checkpoint_save.py", "tests/faults/test_checkpoint_kills.py"),
    ),
    Mutation(
        "a crash loop goes on", "launch/postmortem.py",
        "if self.last == failure:", "if False:",
        ("tests/unit/test_launch_decisions.py::test_crash_loop_is_the_same_step_rank_and_words",),
    ),
    Mutation(
        "ranks outlive their launcher", "system/process.py",
        "ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)", "pass",
        ("tests/faults/test_launch.py::test_no_rank_outlives_its_launcher",),
    ),
    Mutation(
        "two hold one run folder", "system/files.py",
        "return own.stat().st_nlink > 1", "return True",
        ("tests/unit/test_launch_lease.py",),
    ),
    Mutation(
        "a host votes twice in a term", "plugins/hosts/src/drumline_hosts/vote.py",
        "self.free and term > self.promised", "self.free and term >= self.promised",
        ("plugins/hosts/tests/test_votes.py::test_a_majority_makes_one_launcher_and_no_second_one_in_its_term",),
    ),
    Mutation(
        "a run that has ended is taken over", "launch/lease.py",
        'if self.after not in (None, _token(seen or b"")):', 'if seen and self.after not in (None, _token(seen)):',
        ("plugins/hosts/tests/test_votes.py::test_the_lease_of_a_dead_launcher_goes_to_one_heir",),
    ),
    Mutation(
        "a secret is written down", "system/redact.py",
        "text = text.replace(value, REDACTED)", "pass",
        ("tests/unit/test_report_events.py::test_secrets_are_nowhere_in_a_text",),
    ),
]  # fmt: skip


def copy_with(mutation: Mutation, folder: Path) -> Path:
    """The tree with one line that is wrong."""
    tree = folder / "tree"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "*.pyc", "build")
    )
    path = mutation.path_in(tree)
    text = path.read_text()
    assert text.count(mutation.line) == 1, (
        f"{mutation.name}: {mutation.file} has its line {text.count(mutation.line)} times"
    )
    path.write_text(text.replace(mutation.line, mutation.wrong))
    return tree


def noticed(mutation: Mutation) -> bool:
    """Whether a test fails, and not for want of the test: pytest ends with 1."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_with(mutation, Path(folder))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *mutation.tests,
        ]
        env = {**ENV, "PYTHONPATH": source_path(tree)}
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        try:
            said, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return True  # it hangs where the tests of the tree as it is do not
        assert process.returncode in (0, 1), said[-2000:]
        return process.returncode == 1


def main(names: list[str]) -> int:
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    missed = []
    for mutation in chosen:
        found = noticed(mutation)
        missed += [] if found else [mutation.name]
        print(f"{'noticed' if found else 'MISSED '}  {mutation.name}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mistakes noticed")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
