"""The whole zoo in every mode: unequal rows, accumulation, checkpointing, over many steps.

Exact modes are held against one process with all sites' rows; lossy modes against the published algorithm on the sites'
gradients, see `loops.reference`.

A few steps of each model and 30 of some by default; ``DADPLUG_ZOO=full`` takes 200 of all, at 2 and at 4 sites.
"""

import os

import pytest
import zoo
from zoo_training import is_refused, notices, takes_any_rows, trains

from dadplug.step.methods import METHODS, method_names

pytestmark = pytest.mark.slow

FULL = os.environ.get("DADPLUG_ZOO") == "full"
LONG = ("mlp", "conv1d", "words")
SIZES = (2, 4) if FULL else (2,)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("mode", method_names())
@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_zoo_trains_in_every_mode(sites, name, mode, world_size):
    steps = 200 if FULL else 30 if name in LONG else 6
    if METHODS[mode].traits.recomputes_deltas and name not in zoo.CHAINS:
        sites(world_size).run(is_refused, name, mode)
    else:
        for paths in sites(world_size).run(trains, name, mode, steps):
            chained = sum(path == "activations" and each.endswith("weight") for each, path in paths.items())
            assert chained == (zoo.CHAINS[name] if mode == "edad" else 0)


@pytest.mark.parametrize("mode", method_names())
def test_a_wrong_gradient_would_fail(sites, mode):
    for factor in (0.0, 2.0):
        sites(2).run(notices, mode, factor)


ANY_ROWS = [("reentrant", "edad"), ("functions", "edad"), ("partly", "edad"), ("chain", "edad")]
ANY_ROWS += [
    (name, mode)
    for name in ("sizes", "towers", "words", "sparse", "transposed", "repeated")
    for mode in ("dsgd", "dad")
]


@pytest.mark.parametrize(("name", "mode"), ANY_ROWS)
def test_any_rows_at_any_site_whatever_the_layers(sites, name, mode):
    sites(2).run(takes_any_rows, name, mode, 1)
    sites(3).run(takes_any_rows, name, mode, 2)
