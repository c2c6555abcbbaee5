"""Pages that are generated when the documentation is built (`make docs`).

The configuration reference is read from the dataclasses in megavlm/config: type, default, range and
the docstring under each field. The command-line reference is typer's. README, changelog and results
are copied from the repository, the import order from its test.
"""

import ast
import dataclasses
import inspect
import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INTRODUCTION = """# Configuration

All keys of a recipe, by section. A recipe is a YAML file with one mapping for each section; `base`
lists recipes that it builds on, and any key can be changed on the command line:

```bash
megavlm train recipes/grpo/geo3k.yaml run.dir=runs/mine algorithm.steps=200
```

`megavlm train RECIPE --dry-run` prints every key with its resolved value. An unknown key is an
error that suggests the nearest known one. This page is generated from `megavlm/config`.
"""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages. Called by mkdocs."""
    from mkdocs.structure.files import File

    pages = {
        "index.md": home_page(),
        "reference/configuration.md": configuration_page(),
        "reference/cli.md": command_page(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "parity-results.md": (ROOT / "tests/parity/RESULTS.md").read_text(encoding="utf-8"),
        "benchmarks.md": benchmark_page("RESULTS.md"),
        "gpu-stages.md": benchmark_page("GPU.md"),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "]("),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what pages take from the code. Called by mkdocs."""
    return markdown.replace("IMPORT_ORDER", import_order())


# Files outside docs/ that are pages here.
PAGES = {
    "tests/benchmarks/RESULTS.md": "benchmarks.md",
    "tests/benchmarks/GPU.md": "gpu-stages.md",
    "tests/parity/RESULTS.md": "parity-results.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/": "",
}


def home_page() -> str:
    """Return the README, with links from docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path, page in PAGES.items():
        text = text.replace(f"]({path}", f"]({page}")
    return text


def benchmark_page(name: str) -> str:
    """Return a page of results, whose links are from their own folder."""
    text = (ROOT / "tests/benchmarks" / name).read_text(encoding="utf-8")
    return text.replace("](../../docs/", "](")


def import_order() -> str:
    """Return the levels of tests/unit/test_dependencies.py as a numbered list."""
    tree = ast.parse((ROOT / "tests/unit/test_dependencies.py").read_text(encoding="utf-8"))
    levels = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LEVELS"
    )
    names = (", ".join(f"`{name}`" for name in sorted(level)) for level in levels)
    return "\n".join(f"{number}. {line}" for number, line in enumerate(names, 1))


def command_page() -> str:
    """Return the reference of both commands, as typer prints it."""
    text = "# Command line\n\nThis page is generated from the commands' `--help`.\n"
    for name, module in (("megavlm", "megavlm.cli"), ("megavlm-convert", "checkpoint_tools.cli")):
        command = [sys.executable, "-m", "typer", module, "utils", "docs", "--name", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        # One level deeper: the page has its own title.
        whole = _with_whole_summaries(done.stdout, name)
        lines = (f"#{line}" if line.startswith("#") else line for line in whole.splitlines())
        text += "\n" + "\n".join(lines) + "\n"
    return text


def _with_whole_summaries(page: str, name: str) -> str:
    """Return typer's page in which the list of commands has the whole first paragraph of each
    command's section, where typer cuts it off.
    """

    def entry(found: re.Match[str]) -> str:
        _, _, section = page.partition(f"\n## `{name} {found[1]}`\n\n")
        summary, _, _ = section.partition("\n\n")
        return f"* `{found[1]}`: {' '.join(summary.split())}"

    return re.sub(r"^\* `(\S+)`: .*\.\.\.$", entry, page, flags=re.MULTILINE)


def configuration_page() -> str:
    """Return the reference of all keys. Raises ValueError if a key has no docstring."""
    from megavlm.config import schema

    text = INTRODUCTION
    for name, hint in typing.get_type_hints(schema.Config).items():
        text += f"\n## `{name}` {{ #{name} }}\n"
        choices = typing.get_args(hint) or (hint,)  # of `algorithm`: one class per algorithm
        for cls in dict.fromkeys(base for choice in choices for base in _bases(choice)):
            users = [choice.__name__ for choice in choices if issubclass(choice, cls)]
            if len(choices) > 1:
                text += f"\n**Keys of {' and '.join(users)}**\n"
            text += f"\n{inspect.getdoc(cls)}\n"
            for key, entry in entries(cls):
                anchor = f"{name}.{key}"
                if f"{{ #{anchor} }}" in text:  # SFT has `steps`, too
                    anchor += f".{users[0].lower()}"
                text += f"\n### `{name}.{key}` {{ #{anchor} }}\n\n{entry}"
    return text


def _bases(cls: type) -> list[type]:
    """Return the dataclasses that `cls` is made of, the most general first, those with keys."""
    return [
        base
        for base in reversed(cls.__mro__)
        if dataclasses.is_dataclass(base) and inspect.get_annotations(base)
    ]


def entries(cls: type) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of the fields that `cls` declares, each followed by its inner keys."""
    fields = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key, annotation, docstring in declared_fields(cls):
        if docstring is None:
            raise ValueError(
                f"{cls.__name__}.{key} in {inspect.getsourcefile(cls)} has no docstring: write one "
                "under the field"
            )
        bounds = fields[key].metadata.get("bounds")
        follows = "follows" in fields[key].metadata
        facts = [type_in_words(f"{annotation} | None" if follows else annotation)]
        facts += ["default `null`"] if follows else [_default(fields[key])]
        facts += [str(bounds)] if bounds and str(bounds) else []
        yield key, f"{'; '.join(facts)}\n{{ .facts }}\n\n{docstring}\n"
        for inner in filter(dataclasses.is_dataclass, typing.get_args(hints[key])):
            # Keys of each item of a list (curriculum.stages) or mapping (reward.parts).
            for name, entry in entries(inner):
                yield f"{key}.{name}", entry


def declared_fields(cls: type) -> Iterator[tuple[str, str, str | None]]:
    """Yield (name, annotation, docstring or None) of the fields in the source of a dataclass."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = None
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = inspect.cleandoc(str(following.value.value))
        yield statement.target.id, ast.unparse(statement.annotation), text


WORDS = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "None": "null",
}


def type_in_words(annotation: str) -> str:
    """Return a field's type as a reader of YAML knows it: `int | None` is "integer or null"."""
    return _in_words(ast.parse(annotation, mode="eval").body)


def _in_words(node: ast.expr) -> str:
    if isinstance(node, ast.BinOp):
        return f"{_in_words(node.left)} or {_in_words(node.right)}"
    if not isinstance(node, ast.Subscript):
        return WORDS.get(ast.unparse(node), "mapping")
    kind = ast.unparse(node.value)
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if kind == "Literal":
        return " or ".join(f"`{ast.literal_eval(item)}`" for item in items)
    if kind == "dict":
        return "mapping"
    return f"list of {_in_words(items[0])}"


def _default(field: Any) -> str:
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING or value in ("???", ""):
        return "required"
    return f"default `{value if isinstance(value, str) else json.dumps(value)}`"
