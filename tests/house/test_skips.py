"""The guard over skipped tests does fail a run that skips something new, and only such a run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

TOY = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_known(n):
    pytest.skip("known")

def test_passes():
    pass

@pytest.mark.xfail
def test_fails_as_expected():
    assert False
"""


class Run:
    """A folder of tests under the real conftest.py, with its own skips.toml."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tests/area").mkdir(parents=True)
        shutil.copy(TESTS / "conftest.py", folder / "tests")
        (folder / "pytest.ini").write_text(
            "[pytest]\ntestpaths = tests\naddopts = --import-mode=importlib\n"
        )
        (folder / "tests/area/test_toy.py").write_text(TOY)
        self.expect('reason = "known"\ncount = 3')

    def expect(self, *entries: str) -> None:
        text = "".join(f"[[skip]]\n{entry}\n" for entry in entries)
        (self.folder / "tests/skips.toml").write_text(text)

    def add(self, text: str) -> None:
        (self.folder / "tests/test_more.py").write_text(text)

    def __call__(self, *arguments: str) -> tuple[int, list[str]]:
        """pytest's exit status, and what the guard has said."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        return done.returncode, re.findall(r"^.* skipped, \d+ expected$", done.stdout, re.M)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")])
def test_the_counted_skips_pass_and_one_more_fails(run: Run, workers: tuple[str, ...]) -> None:
    assert run(*workers) == (0, [])
    run.add('import pytest\ndef test_more():\n    pytest.skip("known")\n')
    assert run(*workers) == (1, ["'known': 4 skipped, 3 expected"])
    run.add('import pytest\npytest.importorskip("no_such_module")\n')
    code, said = run(*workers)
    assert code == 1
    (line,) = said
    assert re.match(r".*no_such_module.*: 1 skipped, 0 expected", line)


def test_a_new_reason_fails_a_partial_run_too(run: Run) -> None:
    run.add('import pytest\n@pytest.mark.skip(reason="too hard")\ndef test_more():\n    pass\n')
    assert run("tests/test_more.py") == (1, ["'too hard': 1 skipped, 0 expected"])


def test_fewer_skips_fail_the_whole_run_alone(run: Run) -> None:
    run.expect('reason = "known"\ncount = 4')
    assert run() == (1, ["'known': 3 skipped, 4 expected"])
    assert run("-k", "known") == (0, [])
    assert run("tests/area") == (0, [])


def test_conditions_say_where_a_skip_is_expected(run: Run) -> None:
    run.expect('reason = "known"\nwhen = "no make"')
    assert run() == (1, ["'known': 3 skipped, 0 expected"])  # this machine has make
    run.expect('reason = "known"')
    assert run() == (0, [])


def test_a_failing_test_stays_what_it_is(run: Run) -> None:
    run.add("def test_more():\n    assert False\n")
    assert run() == (1, [])
