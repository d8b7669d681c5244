"""Trainers' own ways with gradients of managed rows: clipping, and gradients that a training step throws away."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

BOUND = 0.1


def in_one_process(model, batches, clipped):
    """Train on both sites' batches side by side."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for both in zip(*batches, strict=True):
        *inputs, targets = (torch.cat(parts) for parts in zip(*both, strict=True))
        optimizer.zero_grad()
        (model(*inputs) - targets).square().mean().backward()
        if clipped:
            assert nn.utils.clip_grad_norm_(model.parameters(), BOUND) > BOUND
        optimizer.step()
    return model


def compare(model, expected):
    for (name, value), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(value, other[1], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def fits(how):
    import scores_lightning as strategy

    from dadplug import AdaPMStrategy

    class Discarding(strategy.Manual):
        """Runs a backward pass for something else than the step, and clears what it has brought."""

        def training_step(self, batch, batch_idx):
            self.manual_backward(self(*batch[:2]).square().sum() * 10)
            self.zero_grad()
            super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    module = strategy.Scores("sgd") if how == "clips" else Discarding()
    expected = strategy.Scores("sgd")
    expected.load_state_dict(module.state_dict())
    settings = {"gradient_clip_val": BOUND} if how == "clips" else {}
    trainer = strategy.make_trainer(AdaPMStrategy(), max_epochs=1, **settings)
    own = strategy.data(int(os.environ["RANK"]))
    trainer.fit(module, DataLoader(own, batch_size=strategy.BATCH))
    batches = [list(DataLoader(strategy.data(site), batch_size=strategy.BATCH)) for site in (0, 1)]
    compare(module, in_one_process(expected, batches, how == "clips"))
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)


@pytest.mark.parametrize("how", ["clips", "discards"])
def test_lightning_clips_and_discards_as_one_process(sites, how):
    pytest.importorskip("pytorch_lightning")
    sites(2).run(fits, how)


def runs():
    import scores_catalyst as runner
    from catalyst import dl

    model = runner.Scores()
    expected = copy.deepcopy(model)
    backward = dl.BackwardCallback(
        metric_key="loss", grad_clip_fn=nn.utils.clip_grad_norm_, grad_clip_params={"max_norm": BOUND}
    )
    runner.run(model, epochs=1, callbacks=[backward, dl.OptimizerCallback(metric_key="loss")])
    batches = [list(DataLoader(runner.data(site), runner.BATCH)) for site in (0, 1)]
    compare(model, in_one_process(expected, batches, True))


def test_catalyst_clips_as_one_process(sites):
    pytest.importorskip("catalyst")
    sites(2).run(runs)


def test_clipping_by_value_is_refused():
    pytest.importorskip("pytorch_lightning")
    import scores_lightning as strategy

    from dadplug import AdaPMStrategy

    trainer = strategy.make_trainer(AdaPMStrategy(), gradient_clip_val=0.1, gradient_clip_algorithm="value")
    with pytest.raises(ValueError, match="cannot be clipped by value: use gradient_clip_algorithm='norm'"):
        trainer.fit(strategy.Scores(), DataLoader(strategy.data(0), batch_size=4))
