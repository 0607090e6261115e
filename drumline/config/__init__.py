"""The sections of the YAML, how they are loaded, and where a mistake in them is.

Below are `system` and `hardware`; no torch here. Begin reading with `config` (all sections) and
`load` (a file becomes a Config, for `drumline train` and all other commands). Kinds of strategies,
algorithms and so on are found by `registry`.

Most modules hold sections. These do not: `mistakes` words errors, `complete` serves the shell,
`mesh` computes with ranks, `refusal` and `resume` are values that other rooms share, `old_names` and
`old_plugins` keep plug-ins of before 0.6.0 working.
"""

from drumline.config.old_names import install

install()
