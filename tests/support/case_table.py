"""Runs all cases of a parametrized test as one item of pytest's.

Of a case that takes milliseconds, hooks, reports and what xdist sends for it take more than the test. So cases share
these, while each is set up and torn down with fixtures of its own, all are run, and those that fail are named.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import cast

import pytest

_APART = {"caplog"}
"""Fixtures that find what hooks have left at their item."""


class FailedCases(Exception):
    """Tells which cases failed, and how."""


class CaseTable(pytest.Item):
    """The cases of one test function."""

    cases: list[pytest.Function]
    skipped: list[pytest.TestReport]

    def runtest(self) -> None:
        failed: dict[str, str] = {}
        skips: list[pytest.CallInfo[None]] = []
        ran = 0
        for case in self.cases:
            call = pytest.CallInfo.from_call(
                lambda case=case: self._run(case), when="call", reraise=(KeyboardInterrupt, pytest.exit.Exception)
            )
            if call.excinfo is None:
                ran += 1
            elif call.excinfo.errisinstance(pytest.skip.Exception):
                skips.append(call)
                self.skipped.append(pytest.TestReport.from_item_and_call(case, call))
            else:
                failed[case.name] = str(case.repr_failure(call.excinfo))
        if failed:
            texts = [f"_____ {name} _____\n{text}" for name, text in failed.items()]
            listed = ", ".join(failed)
            raise FailedCases("\n".join([f"{len(failed)} of {len(self.cases)} cases failed: {listed}", *texts]))
        if not ran:
            self.skipped.pop()
            raise cast(pytest.ExceptionInfo[BaseException], skips[-1].excinfo).value

    def _run(self, case: pytest.Function) -> None:
        state = self.session._setupstate
        try:
            state.setup(case)
            case.runtest()
        finally:
            # What is named here is what stays set up.
            state.teardown_exact(self)
            case.funcargs = {}

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> object:
        return str(excinfo.value) if isinstance(excinfo.value, FailedCases) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[object, int | None, str]:
        path, line, _ = self.cases[0].reportinfo()
        return path, line, self.name


def as_tables(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put the cases of each function in one item, where they follow each other and nothing is asked of one alone."""
    runs = [list(run) for _, run in groupby(items, key=_function)]
    parts = Counter(_function(run[0]) for run in runs)
    return [item for run in runs for item in (_table(run) if parts[_function(run[0])] == 1 else run)]


def log_skipped(item: pytest.Item) -> None:
    """Report the cases of a table that were skipped, beside the report of all."""
    if isinstance(item, CaseTable):
        for report in item.skipped:
            report.nodeid = item.nodeid
            item.ihook.pytest_runtest_logreport(report=report)


def _function(item: pytest.Item) -> tuple[str, str]:
    is_case = isinstance(item, pytest.Function) and hasattr(item, "callspec")
    return (item.parent.nodeid, item.originalname) if is_case else (item.nodeid, "")


def _table(run: list[pytest.Item]) -> Iterator[pytest.Item]:
    cases = cast(list[pytest.Function], run)
    first = cases[0]
    if len(cases) == 1 or _APART & set(first.fixturenames) or any(case.callspec.marks for case in cases):
        yield from cases
        return
    table = CaseTable.from_parent(first.parent, name=first.originalname)
    table.cases, table.skipped = cases, []
    table.own_markers = list(first.own_markers)
    for case in cases:
        case.parent = table
    yield table
