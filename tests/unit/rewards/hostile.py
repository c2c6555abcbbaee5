"""A limit on the CPU time of each hostile text, in one process of its own."""

import subprocess
import sys

RUN = """
import resource, time
{imports}
for name, text in {texts!r}.items():
    print(name, flush=True)
    limit = int(time.process_time()) + {seconds}
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    response = eval(text)
    assert {expected}
"""


def assert_cheap(texts: dict[str, str], seconds: int, imports: str, expected: str) -> None:
    """Check that `expected`, an expression of `response`, holds for each text within `seconds`.

    A hang is a failure, not a hung test run. texts: expressions by name.
    """
    code = RUN.format(imports=imports, texts=texts, seconds=seconds, expected=expected)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}: {done.stderr}"
