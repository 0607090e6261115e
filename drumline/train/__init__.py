"""Training: set-up before the launch, the loop, a rank's entry.

`drumline.train` is this room and, called, `train.run.train`.
"""

from drumline.system.callable_room import make_callable

# By name: a rank imports the room, and not the launcher.
make_callable(__name__, "drumline.train.run:train")
