"""Import paths (package.module:name), with which a recipe names a user's own class or function."""

import importlib
import os
import re
import sys
from types import ModuleType

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def import_module(name: str) -> ModuleType:
    """Import a module. As with `python -m`, the working directory is searched, too."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)
