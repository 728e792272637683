"""Ranks that die or hang at a random moment: the others raise and name them, nothing is left behind."""

from benchmarks import soak


def test_killed_and_stopped_ranks():
    soak.kill_rounds(4, world=3, seed=1)
