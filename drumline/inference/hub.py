"""`drumline push`: send a run's export and its model card to Hugging Face's hub, in one commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from drumline.errors import EnvironmentFault, UserError, printable
from drumline.foreign import first_line
from drumline.inference.card import model_card
from drumline.models.export import PROVENANCE, find_or_export
from drumline.plan.explain import size
from drumline.plan.plan import Plan
from drumline.report.bars import bars
from drumline.system.redact import REDACTED

LOGIN = "`hf auth login`, or set HF_TOKEN to a token that may write"
# Suffixes of the weights that an earlier export may have left in the repository.
WEIGHTS = (".safetensors", ".safetensors.index.json", "adapter_config.json")


def push(run: Path, to: str, private: bool, adapter: bool, dry_run: bool, trust: bool) -> None:
    """Send the export of a run to the repository `to`. A run without an export is exported first.

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
    text = model_card(run, plan, folder, to, adapter)
    # Name in the repository → path or content.
    contents: dict[str, Path | bytes] = {}
    for path in sorted(folder.rglob("*")):
        # The provenance names paths of this machine; the card has what others need of it.
        if path.is_file() and path.name != PROVENANCE:
            contents[str(path.relative_to(folder))] = path
    contents["README.md"] = text.encode()
    # False keeps the client from taking the token that is stored on this machine.
    api = HfApi(token=token or False)
    if dry_run:
        for name, content in contents.items():
            if isinstance(content, bytes):
                byte_count = len(content)
            else:
                byte_count = content.stat().st_size
            print(f"{size(byte_count):>12}  {name}")
        print()
        print(printable(text))
        print(f"nothing was sent to {api.endpoint}/{to}")
        return
    with _hub_errors(token):
        url = _send(api, to, private, contents, run.resolve().name)
    print(f"sent {len(contents)} files to {url}")


def _send(
    api: Any, to: str, private: bool, contents: Mapping[str, Path | bytes], run_name: str
) -> str:
    """Send files in one commit, and return the address of the repository.

    Weights of an earlier commit that are not among the files are deleted, so that nobody loads them
    in place of the new ones.

    Args:
        api: The hub's client.
        to: ORG/NAME on the hub.
        private: Whether the repository must be private.
        contents: Name in the repository → path or content.
        run_name: For the message of the commit.
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
    for name, content in contents.items():
        if isinstance(content, bytes):
            operations.append(CommitOperationAdd(name, content))
        else:
            operations.append(CommitOperationAdd(name, str(content)))
    old_names = {sibling.rfilename for sibling in repository.siblings or ()}
    for old_name in sorted(old_names - contents.keys()):
        if old_name.endswith(WEIGHTS):
            operations.append(CommitOperationDelete(old_name))
    api.create_commit(to, operations, commit_message=f"{run_name}, by drumline push")
    return str(url)


@contextmanager
def _hub_errors(
    token: str | None, kind: type[UserError] = EnvironmentFault, where: str = "", fix: str = ""
) -> Iterator[None]:
    """Turn errors of the hub's client inside the block into one line without the token.

    Args:
        token: The token, or None. It may come from a file, which `redact` does not read.
        kind: The class of the error to raise.
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
