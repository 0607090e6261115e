"""Names that libraries keep for themselves, one file a library: no other file imports any (tests/unit/test_imports.py).

Each is looked up when it is first used, so one that a version lacks costs only what needs it. MEMBERS of a file lists the hidden
members of the library's classes that Drumline reads or overrides where it uses such a class (tests/unit/test_vendor.py finds them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any

from drumline.errors import EnvironmentFault


def names(
    library: str, oldest: str, newest: str, places: Mapping[str, str]
) -> Callable[[str], Any]:
    """The `__getattr__` of a file: our name → what stands at its place, `module:name` or the module itself.

    `oldest`, `newest`: the versions that all places were found in. Raises EnvironmentFault, which names them, where one is not there;
    ImportError where the library is not installed.
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"no name of {library} is {name!r} here")
        module, _, own = places[name].partition(":")
        import_module(library)
        try:
            found: Any = import_module(module)
            for part in own.split(".") if own else ():
                found = getattr(found, part)
            return found
        except (ImportError, AttributeError):
            what = f"{library} {metadata.version(library)} has no {places[name].replace(':', '.')}; versions {oldest} to {newest} have it"
            raise EnvironmentFault(
                what, fix=f"pip install '{library}>={oldest},<={newest}'"
            ) from None

    return find
