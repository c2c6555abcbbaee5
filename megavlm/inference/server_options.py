"""Names of the options that the installed SGLang has."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


def option_names() -> set[str]:
    """Return the options of sglang.launch_server by their names in Python.

    They are read from its source: importing it takes many seconds, and what a GPU needs.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("SGLang is not installed here: rollout.mode=managed starts it")
    folder = Path(spec.submodule_search_locations[0], "srt")
    files = [folder / "server_args.py", *(folder / "arg_groups" / "fields").glob("*.py")]
    return {name for file in files for name in _names(ast.parse(file.read_bytes()))}


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield the fields of a module's classes, and the flags that it writes as "--name"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"--[a-z0-9-]+", node.value):
                yield node.value[2:].replace("-", "_")
