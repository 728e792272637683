"""PyTorch's own ways to spread a model over ranks, unchanged: the losses are a single process's."""

import math

import pytest

from benchmarks import parallel

STEPS = 4


def _compare(rank, world, name):
    difference, first, last = parallel.compare(rank, world, name, STEPS)
    recipe = parallel.RECIPES[name]
    assert difference <= recipe.tolerance, f"{name}: losses differ by {difference}"
    # The model is one that learns: equal losses that never change would prove nothing.
    assert abs(first - math.log(len(parallel.SYMBOLS))) < 0.7 and last < first - 0.05


@pytest.mark.parametrize("name", parallel.RECIPES)
def test_losses_are_a_single_process_s(ranks, name):
    ranks(parallel.RECIPES[name].ranks, _compare, name)
