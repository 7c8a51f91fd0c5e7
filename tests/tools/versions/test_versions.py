"""Rows of the page are counted from reports, and replaced one by one."""

from __future__ import annotations

import argparse
from xml.etree import ElementTree

import pytest

from tools.pages import markers
from tools.versions import PART, ROOT, TESTS, Pair, counted, losses, renewed

REPORT = """<testsuites><testsuite tests="4" time="90.0">
<testcase classname="tests.passes.test_a" name="test_x"/>
<testcase classname="tests.passes.test_a" name="test_y[1]"><failure message="no"/></testcase>
<testcase classname="tests.passes.test_b" name="test_z"><skipped/></testcase>
<testcase classname="tests.passes.test_b" name="test_w"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted_and_failures_are_named():
    assert counted(ElementTree.fromstring(REPORT)) == ("1", "`test_a::test_y[1]`<br>`test_b::test_w`", "1", "1.5")


def test_losses_are_the_first_the_last_and_the_held_out_one():
    assert losses([{"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0, "eval_loss": 1.5}]) == ("3.00000", "1.00000", "1.50000")


BEGIN, END = markers(PART)


def test_a_row_takes_the_place_of_its_own_and_rows_are_in_order():
    def made(torch: str, python: str, passed: str) -> tuple[str, ...]:
        return (torch, python, passed, "0", "0", "1.0", "3.0", "2.0", "2.5", "")

    with pytest.raises(ValueError, match="has no lines"):
        renewed(f"text\n{BEGIN}\nend\n", [])

    page = renewed(f"text\n{BEGIN}\n{END}\nend\n", [made("2.13.0", "3.11.7", "5"), made("2.9.0", "3.12.1", "6")])
    page = renewed(page, [made("2.13.0", "3.11.7", "7"), made("2.13.0", "3.9.1", "8"), made("2.13.0+cpu", "3.15.0a1+", "9")])
    assert page.startswith("text\n") and page.endswith("\nend\n")
    rows = [line.split(" | ")[:3] for line in page.splitlines() if line.startswith("| 2")]
    assert rows == [["| 2.9.0", "3.12.1", "6"], ["| 2.13.0", "3.9.1", "8"], ["| 2.13.0", "3.11.7", "7"],
                    ["| 2.13.0+cpu", "3.15.0a1+", "9"]]  # fmt: skip


def test_a_pair_names_both():
    assert Pair.parse("2.11.0:python3.12") == ("2.11.0", "python3.12")
    with pytest.raises(argparse.ArgumentTypeError, match="TORCH:PYTHON"):
        Pair.parse("2.11.0")


def test_the_tests_are_there():
    assert all((ROOT / path.partition("::")[0]).exists() for path in TESTS)
