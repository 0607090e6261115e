"""`drumline push`: a run's export and its model card, to a hub of Hugging Face, in one commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from drumline.core.explain import size
from drumline.core.plan import Plan
from drumline.core.redact import REDACTED
from drumline.errors import EnvironmentFault, UserError, printable
from drumline.foreign import first_line
from drumline.inference.card import card
from drumline.models.export import PROVENANCE, exported
from drumline.report.bars import bars

LOGIN = "`hf auth login`, or set HF_TOKEN to a token that may write"
WEIGHTS = (".safetensors", ".safetensors.index.json", "adapter_config.json")


def push(run: Path, to: str, private: bool, adapter: bool, dry_run: bool, trust: bool) -> None:
    """Export RUN where that is not done, and send it to the repository `to`. `dry_run`: print what would be sent. Raises UserError without
    a token, EnvironmentFault for what the hub refuses; a token stands in no message."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import validate_repo_id

    with _refused(None, UserError, "--to", "write it as ORG/NAME"):
        validate_repo_id(to)
    if to.count("/") != 1:
        raise UserError(
            f"{to!r} is no name of a repository", where="--to", fix="write it as ORG/NAME"
        )
    with _refused(None):
        token = None if dry_run else get_token()
    if not dry_run and not token:
        raise UserError("there is no token for the hub", where="drumline push", fix=LOGIN)
    with bars(Console(stderr=True)) as on_progress:
        folder = exported(run, adapter, on_progress, trust)
    text = card(run, Plan.load(run / "plan.json", trust), folder, to, adapter)
    files = {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != PROVENANCE
    }
    api = HfApi(token=token or False)
    if dry_run:
        for name, path in files.items():
            print(f"{size(path.stat().st_size):>12}  {name}")
        print(
            f"{size(len(text.encode())):>12}  README.md\n\n{printable(text)}\nnothing was sent to {api.endpoint}/{to}"
        )
        return
    with _refused(token):
        url = _send(api, to, private, {**files, "README.md": text.encode()}, run.resolve().name)
    print(f"sent {len(files) + 1} files to {url}")


def _send(api: Any, to: str, private: bool, files: dict[str, Any], name: str) -> str:
    """One commit; weights of an earlier one that are no part of it go. Returns the address of the repository."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    url = api.create_repo(to, private=private or None, exist_ok=True)
    there = api.model_info(to)
    if private and not there.private:
        raise UserError(
            "is there already, and public",
            where=to,
            fix="make it private on its page, name another, or leave --private out",
        )
    old = {sibling.rfilename for sibling in there.siblings or ()} - files.keys()
    gone = [CommitOperationDelete(path) for path in sorted(old) if path.endswith(WEIGHTS)]
    added = [
        CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
        for path, content in files.items()
    ]
    api.create_commit(to, [*added, *gone], commit_message=f"{name}, by drumline push")
    return str(url)


@contextmanager
def _refused(
    token: str | None, kind: type[UserError] = EnvironmentFault, where: str = "", fix: str = ""
) -> Iterator[None]:
    """Whatever the hub's client raises becomes one line, without the token. (Its login may lie in a file, which `redact` does not know.)"""
    from huggingface_hub import constants

    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - of the client, of the HTTP library below it, and of the library that uploads
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            what, fix = f"the hub refuses this token ({status})", LOGIN
        else:
            what = f"{'the hub answers: ' if status else ''}{first_line(error)}"
        what = what.replace(token, REDACTED) if token else what
        raise kind(
            what, where=where or constants.ENDPOINT, fix=fix or "nothing was published; try again"
        ) from None
