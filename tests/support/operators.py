"""Counts of the operators that compute or copy: on a GPU, each of them is a kernel or more."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# They compute nothing: views that torch's schemas do not know as such, and uninitialised memory.
FREE = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::empty", "aten::empty_like"}
FREE |= {"aten::new_empty", "aten::empty_strided", "aten::new_empty_strided", "aten::lift_fresh"}


class Operators(TorchDispatchMode):
    """Context in which operators are counted by name, those of the backward pass too. Views are
    left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name
        if not function.is_view and name not in FREE:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))
