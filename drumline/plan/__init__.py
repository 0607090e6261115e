"""The Plan: how a config is spread over devices, with every number resolved, and the rules for it.

Imports `config`, `hardware` and `system`; no torch here. Begin reading with `plan` (what a plan has)
and `resolve` (how it is made). `rules` and its neighbours refuse what cannot be combined, and `facts`
has the sizes of models. `attention`, `wire` and `out_of_memory` hold decisions that ranks and planner
share. The planner estimates what a plan costs.

The name `drumline.plan` is this package; called as a function, it is `planner.public.plan`.
"""

from drumline.system.callable_room import make_callable

make_callable(__name__, "drumline.planner.public:plan")
