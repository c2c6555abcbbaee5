"""Import paths, by which a recipe names a user's own class or function: package.module:name."""

import importlib
import os
import re
import sys
from types import ModuleType

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def import_module(name: str) -> ModuleType:
    """Import a module as `python -m` finds it, in the working directory, too."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)
