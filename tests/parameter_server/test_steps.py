"""Order of what a step does: what is sent before commits are applied, and what the sequencer learns afterwards."""

from __future__ import annotations

import pytest
import support
import torch
from torch import nn

import dadplug
from dadplug.parameter_server import server as server_module


def sends_before_it_applies(staleness: int) -> tuple[list[int], list[int], int]:
    """Return the contributions sent by each commit, the versions that were reported, and that of the second step."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    server = dadplug.ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.1), staleness=staleness, gather=0)
    sent, reported = [], []
    apply, reach = server._replica.apply, server._log.reach

    def apply_later(commit) -> None:
        sent.append(server._log._count)
        apply(commit)

    def report(version: int) -> None:
        reported.append(version)
        reach(version)

    model(torch.randn(3, 6)).sum().backward()
    server.step()
    while not server._log._commits and not server.version:
        server._log.wait()
    server._replica.apply, server._log.reach = apply_later, report
    model(torch.randn(3, 6)).sum().backward()
    server.step()
    found = list(sent), list(reported), server.version
    server.finish()
    assert server.first_difference() is None
    server.detach()
    return found


@pytest.mark.parametrize("staleness", [2, 20])
def test_a_contribution_leaves_before_commits_are_applied(sites, staleness):
    for sent, reported, version in sites(2).run(sends_before_it_applies, staleness):
        assert set(sent) <= {2}
        if staleness == 2:  # the sequencer would hold back commits for this site
            assert reported == [version] * bool(sent)
        else:
            assert not reported


def holds_some_batches() -> tuple[int, int]:
    """Return the contributions of seven steps on a link that is always busy, and the batches that are left."""
    server_module._MOST_HELD = 3
    model = nn.Linear(6, 4)
    server = dadplug.ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.1), staleness=100)
    server._log._delayed = lambda: True
    for _ in range(7):
        model(torch.randn(3, 6)).sum().backward()
        server.step()
    found = server._log._count, server._held.batches
    server.finish()
    server.detach()
    return found


def test_a_busy_link_holds_so_many_batches_at_most():
    with support.Sites(2) as group:
        assert group.run(holds_some_batches) == [(2, 1)] * 2
