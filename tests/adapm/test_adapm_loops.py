"""Training loops on managed embeddings at two sites: each trains as one process with both sites' rows.

Rows of managed tables are float32, all other numbers here float64; so results agree to the rounding of float32.
"""

from __future__ import annotations

import functools

import pytest
import support
import torch
from adapm_loops import LOOPS, run_all
from managed_loop import Loop
from torch import nn

from dadplug import NonFiniteError
from dadplug.adapm import ParameterManager

TOLERANCE = 3e-6


@functools.cache
def results(kind, mode):
    """Run all loops in one call of the sites; the tests look at what has come of them."""
    return support.sites(2).run(run_all, kind, mode, [program.__name__ for program in LOOPS], timeout=400)


@pytest.mark.parametrize("program", LOOPS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(("kind", "mode"), [("sgd", "dsgd"), ("adagrad", "dad")])
def test_loops_on_managed_rows_train_as_one_process(program, kind, mode):
    for result in (of_site[program.__name__] for of_site in results(kind, mode)):
        assert not isinstance(result, str), result
        off, moved = result
        assert max(off.values()) < TOLERANCE, off
        tables = [moved["words.weight"], moved["tags.weight"]]
        assert min(tables) > 200 * TOLERANCE, moved  # else there would be nothing to see


def refuses():
    with ParameterManager(timeout=200) as manager:
        loop = Loop("sgd", manager.rank, manager=manager)
        loop.update(0)
        before = loop.managed.state_dict()
        loop.zero_grad()
        loop.loss(1).backward()
        with pytest.raises(RuntimeError, match="before gradient"):
            loop.optimizer.step()
        with pytest.raises(
            RuntimeError, match=r"clip_grad_norm_\(\) before the gradient of 'words.weight' is synchronized"
        ):
            loop.managed.clip_grad_norm_(1.0)
        loop.synchronize()
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with pytest.raises(RuntimeError, match=r"spread over the sites.*AdaModel\.other_parameters"):
                clip(loop.managed.parameters(), 1.0)
        loop.zero_grad()
        ids, _ = loop.batch(2)
        rows = loop.net.tags(ids)
        if manager.rank == 1:
            rows.register_hook(lambda gradient: gradient * torch.nan)
        (rows.square().mean() + loop.loss(2)).backward()
        with pytest.raises(NonFiniteError, match=r"NaN or Inf at site 1.*the gradient of rows of 'tags\.weight'"):
            loop.synchronize()
        loop.zero_grad()
        after = loop.managed.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in ("words.weight", "tags.weight"))
        loop.update(3)
        manager.barrier()
        loop.managed.close()


def test_what_would_go_wrong_unseen_is_refused(sites):
    sites(2).run(refuses)
