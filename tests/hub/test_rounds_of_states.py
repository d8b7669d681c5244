"""States that a site announces: their size is checked before memory is taken."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dadplug.errors import SiteError
from dadplug.hub.site.rounds import RoundClient
from dadplug.model_sync.sameness import largest_state


def rounds_of(announced: int) -> RoundClient:
    rounds = object.__new__(RoundClient)
    rounds._link = SimpleNamespace(name=lambda rank: f"site {rank}")
    rounds._donor = 3
    rounds._wait_until = lambda *given: None
    contents = {8: struct.pack("<Q", announced)}
    rounds._receive_part = lambda donor, exchange, nbytes, timeout: contents.get(nbytes, b"x" * nbytes)
    return rounds


def test_a_state_that_is_larger_than_the_model_allows_is_refused():
    model = nn.Linear(100, 100)
    most = largest_state(model)
    assert most > 3 * sum(each.numel() * each.element_size() for each in model.parameters())
    with pytest.raises(SiteError, match=f"site 3 announces a state of {most + 1} bytes, where .* allows {most}"):
        rounds_of(most + 1).receive_state(1.0, most)
    assert rounds_of(1000).receive_state(1.0, most) == b"x" * 1000


def test_the_largest_state_follows_the_model():
    with torch.device("meta"):
        large = nn.Linear(30_000, 30_000)
    assert largest_state(large) > 3 * 4 * 30_000**2
