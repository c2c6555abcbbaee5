"""Import paths (package.module:name), with which a recipe names a user's own class or function."""

import importlib
import os
import re
import sys
from types import ModuleType
from typing import Any

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def import_module(name: str) -> ModuleType:
    """Import a module. As with `python -m`, the working directory is searched, too."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def import_object(path: str) -> Any:
    """Import the object of an import path. Raises ImportError or AttributeError if there is none,
    or any error of its module.
    """
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def import_of_key(key: str, path: str) -> Any:
    """Import the object that a recipe's key names. Raises ValueError if there is none."""
    try:
        return import_object(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key}={path} cannot be imported: {error}") from error
