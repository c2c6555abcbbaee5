"""A house rule that a linter does not know: which errors are caught."""

import re

from tests.unit.test_dependencies import MODULES

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
