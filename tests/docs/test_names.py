"""Files, keys, options and messages that the documentation names exist."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from typer.main import get_command

import checkpoint_tools.cli
import megavlm.cli
from megavlm.config import schema

ROOT = Path(__file__).parents[2]
SPECIFICATION = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
assert SPECIFICATION and SPECIFICATION.loader
hooks = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(hooks)

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests/benchmarks/RESULTS.md"]
)
CURRENT = [path for path in PAGES if path.name != "CHANGELOG.md"]  # it also names what is gone
FOLDERS = "megavlm|checkpoint_tools|recipes|launch|docs|tests|\\.github|\\.ci"
SECTIONS = {
    name: {key for cls in get_args(hint) or (hint,) for key in get_type_hints(cls)}
    for name, hint in get_type_hints(schema.Config).items()
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code(text: str) -> Iterator[str]:
    """Yield the code blocks and the code in lines of a page."""
    blocks = re.findall(r"^```.*?^```", text, re.M | re.S)
    yield from blocks
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    yield from re.findall(r"^ {4}.*$", text, re.M)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    generated = {"configuration.md", "cli.md", "changelog.md"}
    generated |= {"parity-results.md", "benchmarks.md", "gpu-stages.md"}
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"https?://", target) and Path(target).name not in generated:
            assert (page.parent / target).exists(), f"{relative(page)} links to {target}"


@pytest.mark.parametrize("page", CURRENT, ids=relative)
def test_files_that_are_named_exist(page: Path) -> None:
    for piece in code(page.read_text(encoding="utf-8")):
        for name in re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w.*/-]*[\w*/])", piece):
            assert list(ROOT.glob(name.rstrip("/"))), f"{relative(page)} names {name}"


@pytest.mark.parametrize("page", CURRENT, ids=relative)
def test_keys_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "coming-from.md":  # the other frameworks' keys are in the first column
        text = re.sub(r"^\| (`.*?) \| ", "| ", text, flags=re.M)
    for piece in code(text):
        for section, key in re.findall(rf"(?<![\w./])({'|'.join(SECTIONS)})\.([a-z]\w*)", piece):
            if key not in ("py", "yaml", "json", "parquet", "html", "png"):  # a file
                assert key in SECTIONS[section], f"{relative(page)} names {section}.{key}"


@pytest.mark.parametrize("page", CURRENT, ids=relative)
def test_options_and_targets_that_are_named_exist(page: Path) -> None:
    programs = {
        "megavlm": get_command(megavlm.cli.app),
        "megavlm-convert": get_command(checkpoint_tools.cli.app),
    }
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for piece in code(page.read_text(encoding="utf-8")):
        for line in piece.splitlines():
            command = line.split("  #")[0].split()
            if command[:1] == ["make"] and len(command) > 1 and command[1].islower():
                assert command[1] in targets, f"{relative(page)}: {line}"
            if not command or command[0] not in programs:
                continue
            program = programs[command[0]]
            known = {name for p in program.params for name in p.opts} | {"--help"}
            known |= {"--install-completion", "--show-completion"}
            if len(command) > 1 and not command[1].startswith("-") and command[1].islower():
                assert command[1] in program.commands, f"{relative(page)}: {line}"
                known |= {n for p in program.commands[command[1]].params for n in p.opts}
            for word in command[1:]:
                if word.startswith("--"):
                    assert word.split("=")[0] in known, f"{relative(page)}: {line}"


def test_messages_of_the_troubleshooting_page_are_in_the_code() -> None:
    page = (ROOT / "docs/guides/troubleshooting.md").read_text(encoding="utf-8")
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for top in ("megavlm", "checkpoint_tools")
        for path in (ROOT / top).rglob("*.py")
    )
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # parts of one message
    messages = [m for m in re.findall(r"^`(.+)`.*\n:   ", page, re.M) if " " in m]
    assert len(messages) > 30
    for message in messages:
        # Words in capitals and "..." stand for what differs.
        parts = re.split(r"\b[A-Z][A-Z.]*\b|\.\.\.", message)
        fixed = max(parts, key=len).strip(" :'")
        assert fixed in sources, message


def test_the_readme_s_step_is_lines_of_train_step_in_their_order() -> None:
    source = (ROOT / "megavlm/training/policy_trainer.py").read_text(encoding="utf-8")
    step = source.partition("    def train_step(")[2].partition("\n    def ")[0]
    lines = iter(line.strip() for line in step.splitlines())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (excerpt,) = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    for line in excerpt.splitlines():
        assert line in lines, f"{line} is not in train_step, or not at this place"


def test_every_key_has_a_docstring_and_a_place_in_the_reference() -> None:
    page = hooks.configuration_page()
    for section, keys in SECTIONS.items():
        for key in keys:
            assert f"### `{section}.{key}`" in page, f"{section}.{key}"
    anchors = re.findall(r"\{ #(\S+) \}", page)
    assert len(anchors) == len(set(anchors))


def test_a_key_without_docstring_fails() -> None:
    from tests.docs import undocumented

    with pytest.raises(ValueError, match="has no docstring"):
        list(hooks.entries(undocumented.Section))


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        ("int | None", "integer or null"),
        ("tuple[str, ...]", "list of text"),
        ("Literal['a', 'b'] | str", "`a` or `b` or text"),
        ("dict[str, float]", "mapping"),
        ("bool", "true or false"),
    ],
)
def test_types_in_words(annotation: str, words: str) -> None:
    assert hooks.type_in_words(annotation) == words
