"""The sections of the YAML, how they are loaded, and where a mistake in them is.

Below are `system` and `hardware`; no torch here. Begin reading with `config` (all sections) and
`load` (a file becomes a Config). Kinds of strategies, algorithms and so on are found by `registry`.
"""

from drumline.config.old_names import install

install()
