"""Trainers' own ways with gradients of managed rows: clipping, and gradients that a training step throws away."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from scores import BATCH, assert_alike, data, one_process
from torch import nn
from torch.utils.data import DataLoader

BOUND = 0.1


def clip(model: nn.Module) -> None:
    assert nn.utils.clip_grad_norm_(model.parameters(), BOUND) > BOUND


def fits(how):
    import scores_lightning as strategy

    from dadplug import AdaPMStrategy

    class Discarding(strategy.Manual):
        """Runs a backward pass for something else than the step, and clears what it has brought."""

        def training_step(self, batch, batch_idx):
            self.manual_backward(self(batch[0]).square().sum() * 10)
            self.zero_grad()
            super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    module = strategy.Scores("sgd") if how == "clips" else Discarding()
    expected = strategy.Scores("sgd")
    expected.load_state_dict(module.state_dict())
    settings = {"gradient_clip_val": BOUND} if how == "clips" else {}
    trainer = strategy.make_trainer(AdaPMStrategy(), max_epochs=1, **settings)
    trainer.fit(module, DataLoader(data(int(os.environ["RANK"])), batch_size=BATCH))
    before_step = {"before_step": clip} if how == "clips" else {}
    assert_alike(module, one_process(expected, epochs=1, **before_step))
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
    assert_alike(model, one_process(expected, epochs=1, before_step=clip))


def test_catalyst_clips_as_one_process(sites):
    pytest.importorskip("catalyst")
    sites(2).run(runs)


def test_clipping_by_value_is_refused():
    pytest.importorskip("pytorch_lightning")
    import scores_lightning as strategy

    from dadplug import AdaPMStrategy

    trainer = strategy.make_trainer(AdaPMStrategy(), gradient_clip_val=0.1, gradient_clip_algorithm="value")
    with pytest.raises(ValueError, match="cannot be clipped by value: use gradient_clip_algorithm='norm'"):
        trainer.fit(strategy.Scores(), DataLoader(data(0), batch_size=BATCH))
