"""What ``make test-steady`` reads in a report, and that its load ends with it."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.support import steady

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_green"/>
<testcase classname="tests.a" name="test_skipped"><skipped message="no GPU"/></testcase>
<testcase classname="tests.a" name="test_red[1]"><failure message="assert 1 == 2&#10; + where">…</failure></testcase>
<testcase classname="tests.b" name="test_leaves"><error message="left behind: a thread"/></testcase>
</testsuite></testsuites>"""


def test_red_tests_are_those_that_failed_or_could_not_be_set_up_with_why_in_a_line_and_whole() -> None:
    red = steady.red_in(ET.fromstring(REPORT))
    assert red == {"tests.a::test_red[1]": "assert 1 == 2\n…", "tests.b::test_leaves": "left behind: a thread\n"}


def test_each_core_is_busy_inside_the_block_and_nobody_is_left_after_it() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    with steady.load(cores) as pids:
        assert [sorted(os.sched_getaffinity(pid)) for pid in pids] == [[core] for core in cores]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
