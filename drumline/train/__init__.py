"""Training: set-up before the launch, a rank's entry, the loop, and sessions for loops of the user.

Begin reading with `command` (the order of all steps), `setup` (plan and run folder), `entry` (a
rank), `build` (the objects of a rank) and `loop`. A user's own loop is `session`. `failure` handles
what is raised, `health` faults that raise nothing.

`drumline.train` is this room and, called, `train.run.train`.
"""

from drumline.system.callable_room import make_callable

# The function is given by name: a rank imports this package, and must not import the launcher.
make_callable(__name__, "drumline.train.run:train")
