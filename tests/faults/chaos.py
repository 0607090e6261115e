"""As many random kills as asked for, then the truth: losses, samples and weights as in a run that was left alone.

    python -m tests.faults.chaos --kills 20 --seed 0

Each kill is SIGKILL to a rank, to all ranks at once, or to the launcher (the run is then resumed by hand), at a random step or
in the middle of a save. The program prints one line a kill and exits 1 if anything differs afterwards.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.live import gone, kill, ranks_of, wait_for
from tests.faults.test_train_faults import same
from tests.harness import drumline, events, losses, start_interpreter, write_config
from tests.tiny import tiny_model_dir

STEPS_A_KILL = 14
TARGETS = ("rank 0", "rank 1", "all ranks", "launcher")


def chaos(folder: Path, kills: int, seed: int, start: Callable[..., subprocess.Popen[str]] = start_interpreter) -> int:
    """Run twice, once hurt, begun by `start`. Returns the number of steps that had to be done again; raises AssertionError on any
    difference."""
    draw = random.Random(seed)
    steps = STEPS_A_KILL * (kills + 2)
    config = write_config(
        folder,
        tiny_model_dir(folder / "model"),
        rows=90,
        model={"config": {"attention_dropout": 0.1}},
        data={"packing": False},
        launch={"nproc": 2},
        optimizer={"lr": 1e-3},
        run={"steps": steps},
        checkpoint={"every": 5, "keep": 2},
        eval={"at_start": False},
    )
    run, reference = folder / "hurt", folder / "reference"
    assert drumline("train", config, f"run.dir={reference}", timeout=300).code == 0
    process = start("train", config, f"run.dir={run}")
    began = 0.0
    for number in range(kills):
        reached = max(losses(run), default=0) if (run / "events.jsonl").exists() else 0
        step = min(reached + draw.randint(6, STEPS_A_KILL), steps - 3)
        # A run's own steps count, not those that an earlier attempt logged beyond its last checkpoint.
        event = wait_for(run, "step", min(step, STEPS_A_KILL * (number + 1)), process, after=began)
        time.sleep(draw.random() * 0.05)
        target = draw.choice(TARGETS)
        began = time.time()
        if target == "launcher":
            kill(process.pid)
            process.wait()
            assert gone(str(run), 5.0), "ranks outlived their launcher"
            process = start("train", config, f"run.dir={run}", "--resume")
        else:
            ranks = ranks_of(run)
            for pid in [ranks[int(target[-1])]] if target != "all ranks" else ranks.values():
                kill(pid)
        print(f"kill {number + 1}/{kills}: {target} at step {event['step']}", flush=True)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    same(run, reference)
    return len(events(run, "step")) - steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        again = chaos(Path(folder), options.kills, options.seed)
    print(f"{options.kills} kills: losses, samples and weights equal bit for bit; {again} steps done again")


if __name__ == "__main__":
    main()
