"""House rules that a linter does not know: names, and which errors are caught."""

import ast
import collections
import re

import pytest

from tests.unit.test_dependencies import MODULES

# Classes that every model family's folder has.
FAMILY_CLASSES = frozenset(("VisionTower", "MLP", "Block", "Merger"))


BROAD = re.compile(r"except( \(?(Base)?Exception\b.*)?:")
# Where a user's code runs, which may raise anything, and is one of many.
OF_USERS = {
    "megavlm.environments.tools.tool": 1,
    "megavlm.environments.worker": 2,
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
