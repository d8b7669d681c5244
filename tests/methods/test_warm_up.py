"""Warm-up of kernels."""

from __future__ import annotations

import pytest
import torch

from dadplug.methods import METHODS
from dadplug.methods.base import warm_up
from dadplug.options import Options


@pytest.mark.parametrize("mode", sorted(METHODS))
def test_every_method_can_be_warmed_up(mode, monkeypatch):
    calls = []
    encode = METHODS[mode].encode
    monkeypatch.setattr(METHODS[mode], "encode", lambda *args: (calls.append(args[1]), encode(*args))[1])
    state = torch.random.get_rng_state()
    warm_up(Options.create(mode=mode), torch.float32)
    assert calls == ["warm-up"] * (2 * METHODS[mode].traits.takes_factors)
    assert torch.equal(torch.random.get_rng_state(), state)
    warm_up(Options.create(mode=mode), torch.int64)
    assert len(calls) <= 2
