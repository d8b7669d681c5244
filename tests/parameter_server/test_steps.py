"""Order of what a step does: what is sent before commits are applied, and what the sequencer learns afterwards."""

from __future__ import annotations

import logging
import warnings

import pytest
import support
import torch
import torch.distributed as dist
from torch import nn

import dadplug
from dadplug.parameter_server import server as server_module
from dadplug.parameter_server.streams import Kind


def sends_before_it_applies(staleness: int) -> tuple[list[int], list[int], int]:
    """Return the contributions sent by each commit, the versions that were reported, and that of the second step."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    server = dadplug.ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.1), staleness=staleness, gather=0)
    sent, reported = [], []
    apply, send = server._replica.apply, server._log.send

    def apply_later(commit) -> None:
        sent.append(server._log._count)
        apply(commit)

    def report(kind, *fields, **named) -> None:
        if kind is Kind.REACHED:
            reported.append(named["reached"])
        send(kind, *fields, **named)

    model(torch.randn(3, 6)).sum().backward()
    server.step()
    while not server._log._commits and not server.version:
        server._log.wait()
    server._replica.apply, server._log.send = apply_later, report
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


def leaves_early(leaves: bool) -> tuple[list[str], list[str]]:
    """What site 0 is told where site 1 leaves the phase without `finish`, and what site 1 itself is told."""
    model = nn.Linear(4, 3)
    server = dadplug.ParameterServer(model, torch.optim.SGD(model.parameters(), 0.1), mode="dsgd", staleness=2)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dadplug.parameter_server.server").addHandler(handler)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(5, 4)).square().mean().backward()
            server.step()
        with pytest.raises(RuntimeError, match="call finish"):
            server.state_dict()
        if not leaves or dist.get_rank() == 0:
            server.finish()
            server.state_dict()
        server.detach()
    logging.getLogger("dadplug.parameter_server.server").removeHandler(handler)
    return [str(each.message) for each in warned], messages


def test_a_phase_that_a_site_leaves_without_finish_is_told_to_all(sites):
    (warned, messages), (_, own) = sites(2).run(leaves_early, True)
    assert any("site 1" in each and "without finish(), so that its replica differs" in each for each in warned)
    assert not messages
    assert len(own) == 1
    assert "leaves the ParameterServer without finish()" in own[0]
    for _, messages in sites(2).run(leaves_early, False):
        assert not messages
