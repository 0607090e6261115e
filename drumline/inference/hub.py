"""`drumline push`: a run's export and its model card, to a hub of Hugging Face, in one commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from drumline.errors import EnvironmentFault, UserError, printable
from drumline.foreign import first_line
from drumline.inference.card import card
from drumline.models.export import PROVENANCE, find_or_export
from drumline.plan.explain import size
from drumline.plan.plan import Plan
from drumline.report.bars import bars
from drumline.system.redact import REDACTED

LOGIN = "`hf auth login`, or set HF_TOKEN to a token that may write"
# The ends of the names of files that an earlier export may have left in the repository.
WEIGHTS = (".safetensors", ".safetensors.index.json", "adapter_config.json")


def push(run: Path, to: str, private: bool, adapter: bool, dry_run: bool, trust: bool) -> None:
    """Export RUN unless that is done, and send it to the repository `to`.

    Args:
        run: The run folder.
        to: ORG/NAME on the hub.
        private: The repository is created private.
        adapter: Send only the adapter.
        dry_run: Print what would be sent, and send nothing.
        trust: Run code that comes with the model.

    Raises UserError without a token, EnvironmentFault for what the hub refuses. No message has the
    token.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import validate_repo_id

    with _hub_errors(None, UserError, "--to", "write it as ORG/NAME"):
        validate_repo_id(to)
    if to.count("/") != 1:
        what = f"{to!r} is no name of a repository"
        raise UserError(what, where="--to", fix="write it as ORG/NAME")
    # Before the export, which may take long.
    token = None
    if not dry_run:
        with _hub_errors(None):
            token = get_token()
        if not token:
            raise UserError("there is no token for the hub", where="drumline push", fix=LOGIN)
    with bars(Console(stderr=True)) as on_progress:
        folder = find_or_export(run, adapter, on_progress, trust)
    plan = Plan.load(run / "plan.json", trust)
    text = card(run, plan, folder, to, adapter)
    card_bytes = text.encode()
    files = {}
    for path in sorted(folder.rglob("*")):
        # The provenance names paths of this machine; the card has what others need of it.
        if path.is_file() and path.name != PROVENANCE:
            files[str(path.relative_to(folder))] = path
    # False keeps the client from taking the token that is stored on this machine.
    api = HfApi(token=token or False)
    if dry_run:
        for name, path in files.items():
            file_size = size(path.stat().st_size)
            print(f"{file_size:>12}  {name}")
        print(f"{size(len(card_bytes)):>12}  README.md\n")
        print(printable(text))
        print(f"nothing was sent to {api.endpoint}/{to}")
        return
    with _hub_errors(token):
        contents = {**files, "README.md": card_bytes}
        url = _send(api, to, private, contents, run.resolve().name)
    number = len(files) + 1
    print(f"sent {number} files to {url}")


def _send(api: Any, to: str, private: bool, files: dict[str, Any], name: str) -> str:
    """Send files in one commit, and return the address of the repository.

    Weights of an earlier commit that are not among the files are deleted, so that nobody loads them
    in place of the new ones.

    Args:
        api: The hub's client.
        to: ORG/NAME on the hub.
        private: Whether the repository must be private.
        files: Name in the repository → path or content.
        name: Of the run, for the message of the commit.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    # None leaves the visibility to the organisation's default.
    url = api.create_repo(to, private=private or None, exist_ok=True)
    repository = api.model_info(to)
    if private and not repository.private:
        what = "is there already, and public"
        fix = "make it private on its page, name another, or leave --private out"
        raise UserError(what, where=to, fix=fix)
    operations: list[Any] = []
    for path, content in files.items():
        if not isinstance(content, bytes):
            content = str(content)
        operations.append(CommitOperationAdd(path, content))
    old_names = {sibling.rfilename for sibling in repository.siblings or ()}
    for old_name in sorted(old_names - files.keys()):
        if old_name.endswith(WEIGHTS):
            operations.append(CommitOperationDelete(old_name))
    api.create_commit(to, operations, commit_message=f"{name}, by drumline push")
    return str(url)


@contextmanager
def _hub_errors(
    token: str | None, kind: type[UserError] = EnvironmentFault, where: str = "", fix: str = ""
) -> Iterator[None]:
    """Within the context an error of the hub's client becomes a line without the token.

    Args:
        token: It may lie in a file, which `redact` does not know.
        kind: The class of the error.
        where: The error's place; the hub's address if it is empty.
        fix: The error's fix; a usual one if it is empty.
    """
    from huggingface_hub import constants

    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - of the client, of the HTTP library below it, and of the library that uploads
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            what = f"the hub refuses this token ({status})"
            fix = LOGIN
        elif status:
            what = f"the hub answers: {first_line(error)}"
        else:
            what = first_line(error)
        if token:
            what = what.replace(token, REDACTED)
        place = where or constants.ENDPOINT
        raise kind(what, where=place, fix=fix or "nothing was published; try again") from None
