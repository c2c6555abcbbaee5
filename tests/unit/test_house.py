"""House rules that a linter does not know: names, and how docstrings begin."""

import ast
import collections
import re
from collections.abc import Iterator

import pytest

from tests.unit.test_dependencies import MODULES

# First words of docstrings that leave out their verb or subject.
BAD_STARTS = frozenset(
    "What Of Where Whether Those How Which Who When Why All Each Every As In On By For With"
    " Without From At Same Not Before After Within Under Two None ValueError Raises".split()
)
# Of functions, besides: articles, and verbs in the third person ("Returns").
ARTICLES = frozenset(("A", "An", "The", "One", "This", "That", "Its", "Their"))
THIRD_PERSON = re.compile(r"[A-Z][a-z]+[^s]s\b(?<!Address)")
# Classes that every model family's folder has.
FAMILY_CLASSES = frozenset(("VisionTower", "MLP", "Block", "Merger"))


def documented(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (name, node, docstring) of a module and all that it defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield getattr(node, "name", "the module"), node, text


def is_function(node: ast.AST) -> bool:
    """Return True for functions and methods, but not for properties."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    names = {getattr(decorator, "id", "") for decorator in node.decorator_list}
    return not names & {"property", "cached_property"}


def bad_docstrings(source: str) -> list[str]:
    found = []
    for name, node, text in documented(ast.parse(source)):
        first = re.split(r"[\s,.:;]", text.lstrip("`"), maxsplit=1)[0]
        bad = first in BAD_STARTS
        if is_function(node):
            bad = bad or first in ARTICLES or THIRD_PERSON.fullmatch(first) is not None
        if bad:
            found.append(f"{name}: {text.splitlines()[0]}")
    return found


def test_docstrings_begin_with_a_verb_or_a_subject() -> None:
    found = {name: bad_docstrings(path.read_text(encoding="utf-8")) for path, name in MODULES}
    assert {name: bad for name, bad in found.items() if bad} == {}


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """What a run leaves."""',
        'def f():\n    """Returns the sum."""',
        'def f():\n    """The sum of all."""',
        'class A:\n    """Of a pack."""',
        '"""Where a run is."""',
    ],
)
def test_a_bad_docstring_is_found(source: str) -> None:
    assert bad_docstrings(source) != []


BROAD = re.compile(r"except( \(?(Base)?Exception\b.*)?:")
# Where a user's code runs, which may raise anything, and is one of many.
OF_USERS = {
    "megavlm.environments.worker": 1,
    "megavlm.rewards.worker": 1,
    "megavlm.rollout.timed_environment": 1,
}


def test_no_error_is_caught_that_is_not_named() -> None:
    found = {name: len(BROAD.findall(path.read_text())) for path, name in MODULES}
    assert {name: count for name, count in found.items() if count} == OF_USERS


@pytest.mark.parametrize("line", ["except:", "except Exception:", "except BaseException as e:"])
def test_a_broad_clause_is_found(line: str) -> None:
    assert BROAD.search(line) and not BROAD.search("except (ValueError, OSError) as error:")


def test_a_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path, name in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in FAMILY_CLASSES} == {}
