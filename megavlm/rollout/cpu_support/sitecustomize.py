"""Start-up hook for SGLang's processes on a machine without a GPU.

Python imports `sitecustomize` in every process whose PYTHONPATH holds this directory: in the server
and in the workers that it spawns. Stock SGLang then needs two things, and gets no more:

1. torchvision must be importable beside a CPU build of torch: its two missing operators are
   defined right before the first `import torchvision`, never earlier, so that a process that does
   not use torchvision does not import torch for it.
2. `sgl_kernel` must be importable: the directory beside this file holds an import-only stand-in.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

# Loaded by its path: megavlm itself need not be importable in the server's processes.
_OPERATORS = Path(__file__).resolve().parents[2] / "parallel" / "torchvision_ops.py"


class TorchvisionHook(importlib.abc.MetaPathFinder):
    """Defines torchvision's operators when it is first looked for; finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)  # first: what follows looks for torchvision too
            spec = importlib.util.spec_from_file_location("_torchvision_ops", _OPERATORS)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["_torchvision_ops"] = module  # the operators live as long as the module
            spec.loader.exec_module(module)
            module.define_torchvision_operators()
        return None


sys.meta_path.insert(0, TorchvisionHook())
