"""The Plan: how a config is spread over devices, with every number resolved, and the rules for it.

Imports `config` and `system`; no torch here. Begin reading with `plan` (what a plan has) and
`resolve` (how it is made). The planner estimates what a plan costs. The name `drumline.plan` is
this room; called as a function, it is `planner.public.plan`.
"""

from drumline.system.callable_room import make_callable

make_callable(__name__, "drumline.planner.public:plan")
