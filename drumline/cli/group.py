"""All commands as one group of typer: Drumline's own, then those of installed packages."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from drumline.cli import plugins
from drumline.cli.usage import MOST_SHOWN, UsageMistake
from drumline.config.registry import nearest


class CommandGroup(TyperGroup):
    """The group of all commands. It refuses an unknown command with an error of Drumline."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return own + [name for name in plugins.plugin_names() if name not in own]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        return plugins.plugin_command(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not ctx.resilient_parsing:  # true if the shell completes an unfinished line
            self._check_name(ctx, name)
        return super().resolve_command(ctx, args)

    def _check_name(self, ctx: Any, name: str) -> None:
        """Raise UsageMistake for an unknown command.

        Raise ConfigError for a command of Drumline itself that an installed package offers, too.
        """
        if name in self.commands:
            plugins.refuse_own_name(name)
            return
        known = self.list_commands(ctx)
        if name in known:
            return
        distribution = plugins.distribution_of(name)
        if distribution is not None:
            raise UsageMistake(f"drumline {name} needs pip install {distribution}")
        guess = nearest(name, [*known, *plugins.distributed_names()])
        fix = f"did you mean {guess!r}?" if guess else "`drumline --help` lists all"
        raise UsageMistake(f"there is no command {name[:MOST_SHOWN]!r}", where="drumline", fix=fix)
