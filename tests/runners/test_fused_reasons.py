"""Reasons for which a trainer's optimizer steps are not fused."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from dadplug.runners._lightning.strategy import SiteStrategy
from torch import nn

from dadplug.fused import fused_remarks


def lightning_class(name: str, *hooks: str) -> type:
    made = type(name, (), dict.fromkeys(hooks, lambda self: None))
    made.__module__ = "lightning.pytorch.core"
    return made


HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
Module = lightning_class("LightningModule", *HOOKS, "configure_gradient_clipping", "optimizer_step")
Callback = lightning_class("Callback", *HOOKS)


def reason(module=None, precision=None, callbacks=(), *, manual=False, may_leave=False, **trainer) -> str:
    module = module or type("Net", (Module,), {})()
    module.automatic_optimization = not manual
    settings = {"gradient_clip_val": None, "gradient_clip_algorithm": None} | trainer
    strategy = SimpleNamespace(
        lightning_module=module,
        precision_plugin=precision or SimpleNamespace(),
        _trainer=SimpleNamespace(callbacks=list(callbacks), **settings),
        _elastic=object() if may_leave else None,
    )
    return SiteStrategy._reason_against_fusing(strategy)


def test_what_needs_gradients_has_a_reason():
    assert reason() == reason(callbacks=[type("Mine", (Callback,), {})()]) == ""
    assert reason(gradient_clip_val=1.0) == reason(gradient_clip_val=1.0, gradient_clip_algorithm="norm") == ""
    assert "by value" in reason(gradient_clip_val=1.0, gradient_clip_algorithm="GradClipAlgorithmType.VALUE")
    assert "GradScaler" in reason(precision=SimpleNamespace(scaler=object()))
    assert reason(precision=SimpleNamespace(scaler=None)) == ""  # bf16-mixed
    assert "manual" in reason(manual=True)
    assert "min_sites" in reason(may_leave=True)
    for hook in (*HOOKS, "configure_gradient_clipping", "optimizer_step"):
        assert f"Net.{hook}" in reason(type("Net", (Module,), {hook: lambda self: None})())
    for hook in HOOKS:
        assert f"Mine.{hook}" in reason(callbacks=[type("Mine", (Callback,), {hook: lambda self: None})()])
    stock = lightning_class("GradientMonitor", "on_before_optimizer_step")
    assert "GradientMonitor" in reason(callbacks=[stock()])


def test_the_plan_names_the_weights_whose_gradients_are_formed():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    weights = list(model.parameters())
    assert fused_remarks(model, [torch.optim.SGD(weights, lr=0.1)]) == ("fused steps: yes",)
    assert fused_remarks(model, [torch.optim.RMSprop(weights)]) == ("fused steps: no, RMSprop has no fused step",)
    mixed = [torch.optim.SGD(weights[:1], lr=0.1), torch.optim.RMSprop(weights[1:])]
    assert fused_remarks(model, mixed) == ("fused steps: yes", "  1.weight: no, RMSprop has no fused step")


def test_clipping_is_restored():
    calls = []

    class Precision:
        def clip_grad_by_norm(self, optimizer, clip_val):
            calls.append(("plain", clip_val))

        def main_params(self, optimizer):
            return [1, 2]

    strategy = SiteStrategy.__new__(SiteStrategy)
    strategy.precision_plugin = precision = Precision()
    strategy._exchange = SimpleNamespace(holds=True, clip_held=lambda *given: calls.append(given))
    strategy._run = ExitStack()

    def steps():
        with strategy._run:
            strategy._replace_clipping()
            precision.clip_grad_by_norm(None, 0.5)
            strategy._exchange.holds = False
            precision.clip_grad_by_norm(None, 0.25)
            raise KeyError

    with pytest.raises(KeyError):
        steps()
    precision.clip_grad_by_norm(None, 0.1)
    assert calls == [([1, 2], 0.5), ("plain", 0.25), ("plain", 0.1)]
