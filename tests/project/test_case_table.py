"""Cases of a parametrized test are one item, of which every case runs, and every one that fails is named."""

import pytest

from tests.conftest import REPOSITORY

pytest_plugins = ["pytester"]

CONFTEST = """
import sys
sys.path.insert(0, {repository!r})
from tests.conftest import pytest_collection_modifyitems, pytest_runtest_makereport, tmp_path
"""
CASES = """
import pytest

@pytest.fixture(scope="module", params=["a", "b"])
def letter(request):
    return request.param

@pytest.fixture
def own():
    yield []
    assert not closing_fails

closing_fails = False

@pytest.mark.parametrize("n", range(5))
def test_some_fail(n, own, tmp_path, monkeypatch):
    own.append(n)
    assert own == [n] and not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    assert n not in (2, 4)

@pytest.mark.parametrize("n", range(3))
def test_closing_fails(n, own):
    global closing_fails
    closing_fails = n == 1

@pytest.mark.parametrize("n", range(5))
def test_some_skip(n):
    if n > 2:
        pytest.skip("too many")

@pytest.mark.parametrize("n", range(3))
def test_all_skip(n):
    pytest.skip("none at all")

@pytest.mark.parametrize("n", range(2))
def test_of_each_letter(letter, n):
    pass

@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.skip(reason="marked"))])
def test_marked(n):
    pass

@pytest.mark.parametrize("n", range(2))
def test_logs(caplog, n):
    assert caplog.text == ""
"""


def test_every_case_runs_and_those_that_fail_or_skip_are_named(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.format(repository=str(REPOSITORY)))
    pytester.makepyfile(CASES)
    result = pytester.runpytest_inprocess("-ra", "-p", "no:cacheprovider", "-p", "no:xdist")
    # Apart stay a case with a mark of its own, and those that look at what a hook leaves at their item.
    result.assert_outcomes(failed=2, passed=5, skipped=6)
    result.stdout.fnmatch_lines_random(
        [
            "2 of 5 cases failed: test_some_fail?2?, test_some_fail?4?",
            "1 of 3 cases failed: test_closing_fails?1?",
            "SKIPPED ?2? *: too many",
            "SKIPPED ?3? *: none at all",
            "SKIPPED ?1? *: marked",
        ]
    )


def test_one_case_runs_alone(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.format(repository=str(REPOSITORY)))
    path = pytester.makepyfile(CASES)
    words = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    assert pytester.runpytest_inprocess(*words, f"{path}::test_some_fail[2]").parseoutcomes()["failed"] == 1
    result = pytester.runpytest_inprocess(*words, f"{path}::test_some_fail[1]")
    result.assert_outcomes(passed=1)
