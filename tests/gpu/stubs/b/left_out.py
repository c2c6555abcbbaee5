"""Stand-ins for packages that the GPU kit leaves out: SGLang imports them, and rollouts do not use
them.
"""

from collections.abc import Callable
from typing import Any


class StandIn:
    """A class of a package that is left out: it can be named, and not be made or called."""

    def __new__(cls, *_: object, **__: object) -> Any:
        raise RuntimeError(f"{cls.__module__}.{cls.__name__} was used; the GPU kit leaves it out")

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> dict[str, Any]:
        return {"type": "is-instance", "cls": cls}  # for fields of this type


def stand_ins(module: str) -> Callable[[str], type]:
    """Return a module's `__getattr__`: every name is a stand-in."""

    def get(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return type(name, (StandIn,), {"__module__": module})

    return get
