"""A small run of the random programs; `python tests/fusion/programs.py --count 100000` is the large one."""

import programs


def test_fusion_changes_no_bit():
    different, coverage = programs.compare(first=1_000_000, count=1500)
    assert not different
    assert len(coverage) > 700, "the programs do not cover what they should"
