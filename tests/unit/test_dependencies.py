"""The import rules that hold the parts together, read from the source of every module."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Lower never imports higher; packages of one level do not import each other. A module's package is
# the part of its name after `megavlm.`.
LEVELS = [
    {"__version__"},
    {
        "families",  # imports a family's modules when they are used
        "arrays",
        "commands",
        "import_path",
        "process",
        "git_lfs",
        "http_client",
        "numbers",
        "temporary",
        "writing",
    },
    {"config", "observability", "demo_folder", "model_config"},
    {"task"},  # imports a task's modules when they are used
    {"algorithms", "subprocess_pool", "parallel", "sglang_cpu"},
    {"rewards"},
    {"environments", "data"},
    {"models"},
    {"checkpointing", "inference"},
    {"weight_sync", "evaluation"},
    {"tasks"},
    {"rollout"},
    {"training", "checkpoint_tools"},  # neither imports the other; run imports both
    {"planner"},
    {"run"},
    {"demo", "slurm"},
    {"cli"},
    {"__main__"},
]
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
# Packages that do without these libraries, wherever in a module they would be imported.
FORBIDDEN = {
    "subprocess_pool": {"torch", "megatron", "sglang", "transformers"},
    "rewards": {"torch", "megatron", "sglang", "transformers"},
    "environments": {"torch", "megatron", "sglang", "transformers"},
    "task": {"torch", "megatron", "sglang", "transformers"},
    "tasks": {"torch", "megatron", "sglang", "transformers"},
    "algorithms": {"torch.distributed", "megatron", "sglang"},
    "config": {"torch", "megatron", "sglang", "transformers"},
    "observability": {"torch.distributed", "megatron", "sglang"},
    "families": {"torch", "megatron", "sglang", "transformers"},
    "cli": {"torch", "megatron", "sglang", "transformers"},
}
PLATFORM = ROOT / "megavlm" / "parallel" / "platform.py"


def package_of(name: str) -> str:
    """`megavlm.data.rows` is of data, `checkpoint_tools.cli` of checkpoint_tools."""
    parts = name.split(".")
    return parts[0] if parts[0] == "checkpoint_tools" else ".".join(parts[1:2])


def modules() -> Iterator[tuple[Path, str]]:
    """(file, dotted name) of the source that we ship, what runs inside the server left out."""
    for top in ("megavlm", "checkpoint_tools"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not {"sglang_cpu", "server_support"} & {*path.parts}:
                yield path, name


MODULES = list(modules())


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names; `from a import b` gives a.b, which may be a module or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`torch.cuda.Stream` of an attribute chain, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def within(name: str, library: str) -> bool:
    return name == library or name.startswith(library + ".")


def broken_rules(name: str, source: str) -> list[str]:
    """What a module of this name may not import or use, of what it does."""
    tree, package, found = ast.parse(source), package_of(name), []
    for imported in imports(tree):
        if within(imported, "megavlm") or within(imported, "checkpoint_tools"):
            other = package_of(imported)
            if other and other != package and LEVEL[other] >= LEVEL[package]:
                found.append(f"{name} imports {imported}, which is not below it")
        for library in FORBIDDEN.get(package, ()):
            if within(imported, library):
                found.append(f"{name} imports {imported}, which {package} does without")
    if name != "megavlm.parallel.platform":
        used = {*imports(tree), *(dotted(node) for node in ast.walk(tree))}
        for library in ("torch.cuda", "torch.accelerator"):
            if any(within(item, library) for item in used):
                found.append(f"{name} uses {library}: ask megavlm.parallel.platform")
    return found


def test_every_module_keeps_the_rules() -> None:
    found = [broken_rules(name, path.read_text(encoding="utf-8")) for path, name in MODULES]
    assert [rule for broken in found for rule in broken] == []


def import_graph() -> dict[str, set[str]]:
    """Return the modules of ours that each module imports, under TYPE_CHECKING and in functions,
    too.
    """
    names = {name for _, name in MODULES}
    graph = {}
    for path, name in MODULES:
        imported = set(imports(ast.parse(path.read_text(encoding="utf-8"))))
        parents = {item.rpartition(".")[0] for item in imported - names}
        graph[name] = (imported | parents) & names - {name}
    return graph


def test_no_modules_import_each_other() -> None:
    order = TopologicalSorter(import_graph()).static_order()  # raises CycleError with the modules
    assert set(order) == {name for _, name in MODULES}


def test_every_package_has_a_level() -> None:
    assert {package_of(name) for _, name in MODULES} - {""} <= set(LEVEL)
    assert PLATFORM.is_file()


def test_the_packages_themselves_import_nothing() -> None:
    for name in (
        "megavlm",
        "megavlm.config",
        "megavlm.checkpointing",
        "megavlm.training",
        "megavlm.inference",
        "megavlm.run",
    ):
        path = ROOT.joinpath(*name.split("."), "__init__.py")
        assert list(imports(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("megavlm.data.rows", "from megavlm.models import build"),
        ("megavlm.families", "from megavlm.models.qwen2_vl import config"),
        ("megavlm.data.rows", "def f():\n    import megavlm.training.step"),
        ("megavlm.rewards.boxed", "import torch.nn"),
        ("megavlm.environments.base", "from torch import nn"),
        ("megavlm.algorithms.losses", "import torch.distributed as dist"),
        ("megavlm.algorithms.losses", "from torch import distributed"),
        ("megavlm.observability.plots", "from megavlm.config.schema import Config"),
        ("megavlm.inference.client", "from megavlm.checkpointing import folder"),
        ("megavlm.families", "import torch\ntorch.cuda.synchronize()"),
        ("megavlm.families", "from torch.cuda import Stream"),
        ("megavlm.families", "from torch import accelerator"),
        ("megavlm.run.train", "import megavlm.cli"),
        ("checkpoint_tools.cli", "from megavlm.run.train import train"),
        ("checkpoint_tools.cli", "from megavlm.training.train_state import TrainState"),
        ("megavlm.training.train_state", "import checkpoint_tools.export_hf"),
    ],
)
def test_a_broken_rule_is_found(name: str, source: str) -> None:
    assert broken_rules(name, source) != []
