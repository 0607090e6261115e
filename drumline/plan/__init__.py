"""The Plan: how a config is spread over the processes there are, with every number resolved, and the rules for it.

Imports `config` and `system`; no torch here. Begin reading with `plan` (what a plan has) and `resolve` (how it is
made). What a plan costs is the planner's. `drumline.plan` is this room and, called, `planner.public.plan`.
"""

from drumline.system.callable_room import make_callable

make_callable(__name__, "drumline.planner.public:plan")
