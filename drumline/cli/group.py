"""The group of all commands: Drumline's own, then those of installed packages."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from drumline.cli import plugins
from drumline.cli.usage import MOST_SHOWN, UsageMistake
from drumline.config.registry import nearest


class Group(TyperGroup):
    """The group of all commands; an unknown one is refused in our words."""

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
        if not ctx.resilient_parsing:  # the shell completes a line that is not finished
            self._check_name(ctx, name)
        return super().resolve_command(ctx, args)

    def _check_name(self, ctx: Any, name: str) -> None:
        """Raise UsageMistake for an unknown command, ConfigError for one that is offered twice."""
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
