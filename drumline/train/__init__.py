"""Training: set-up before the launch, a rank's entry, the loop, and sessions for loops of the user.

Begin reading with `command` (the order of all steps), `setup` (plan and run folder), `entry` (a
rank), `build` (the objects of a rank) and `loop`. `launched` takes the place of our launcher if
another one, such as torchrun, has started the ranks. A user's own loop is `session`.

`failure` handles what is raised, `replan` finds another plan after memory ran out, and `health`
finds faults that raise nothing. Two commands do not train a run: `preview` shows the samples that
the model would get, and `probe` times a few steps of the planner's best candidates.

`drumline.train` is this room and, called, `train.run.train`.
"""

from drumline.system.callable_room import make_callable

# The function is given by name: a rank imports this package, and must not import the launcher.
make_callable(__name__, "drumline.train.run:train")
