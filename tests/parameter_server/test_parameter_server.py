"""The parameter server in processes: synchronous bits, equal replicas, counted contributions, errors."""

import contextlib
import copy
import itertools
import logging
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import support
import torch
import torch.distributed as dist
import zoo
from local_reference import ends_equal
from running_hub import running_hub
from server_log import keys, recorded
from support import refuses
from torch import Tensor, nn

import dadplug
from dadplug.errors import NonFiniteError, SiteError
from dadplug.exchange.status import announce
from dadplug.parameter_server import server as server_module
from dadplug.parameter_server.gradients import CommittedBatchNorms, ContributionCodec
from dadplug.parameter_server.streams import FrameKind
from dadplug.step.model_sync.samples import SampleCounter


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    # no bias before the normalisation: its gradient is rounding noise, which Adam magnifies
    layers = [
        nn.Linear(12, 20, bias=False),
        nn.BatchNorm1d(20),
        nn.ReLU(),
        nn.Linear(20, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    ]
    return nn.Sequential(*layers)


def batch(step: int, rank: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(rows, 12, generator=generator)
    return inputs, (inputs.abs().argmax(1) % 3)


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def follows_reduction(mode: str) -> None:
    rank = dist.get_rank()
    first = network(rank)
    second = copy.deepcopy(first)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (first, second)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 10, 0.5) for each in optimizers]
    merge = "all" if mode == "rankdad" else "auto"
    reduction = dadplug.GradientReduction(first, mode=mode, rank=2, weighting="samples", merge=merge)
    server = dadplug.ParameterServer(second, optimizers[1], mode=mode, rank=2, staleness=0, weighting="samples")
    for step in range(15):
        # A parameter server keeps what rankdad has not sent in units of the site, a reduction in units of the mean.
        inputs, targets = batch(step, rank, 5 if mode == "rankdad" else 4 + (step + rank) % 3)
        optimizers[0].zero_grad()
        nn.functional.cross_entropy(first(inputs), targets).backward()
        reduction.synchronize()
        optimizers[0].step()
        nn.functional.cross_entropy(second(inputs), targets).backward()
        server.step()
        assert server.version == step + 1
        for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
            assert torch.equal(one, other), f"{mode}, step {step}: {name}"
        for scheduler in schedulers:
            scheduler.step()
    ends_equal(server)


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_staleness_it_has_the_bits_of_the_reduction(sites, world_size):
    for mode in ("dsgd", "dad", "rankdad"):
        sites(world_size).run(follows_reduction, mode)


KINDS = ("mixed", "tied", "functional", "partly", "reentrant", "conv", "transposed", "images", "bags", "sparse", "gru")


@support.at_sites(2)
def test_every_kind_of_layer_trains() -> None:
    """Models of the zoo, without staleness, beside a reduction; in the narrow formats, equal replicas."""
    rank = dist.get_rank()
    for name in KINDS:
        torch.manual_seed(3)
        first = zoo.build(name)
        second = copy.deepcopy(first)
        mode = "dad" if len(name) % 2 else "rankdad"
        reduction = dadplug.GradientReduction(first, mode=mode, weighting="samples")
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
        server = dadplug.ParameterServer(second, optimizers[1], mode=mode, staleness=0, weighting="samples")
        for step in range(3):
            inputs, targets = zoo.batch(name, 5 + rank, seed=2 * step + rank)
            optimizers[0].zero_grad()
            zoo.loss(first, inputs, targets).backward()
            reduction.synchronize()
            optimizers[0].step()
            zoo.loss(second, inputs, targets).backward()
            server.step()
        for (parameter, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12), f"{name}: {parameter}"
        ends_equal(server)
        reduction.detach()
    for wire in ("bf16", "int8"):
        model = zoo.build("mixed", torch.float32)
        before = bits(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        server = dadplug.ParameterServer(
            model, optimizer, mode="rankdad", rank=2, wire=wire, staleness=3, weighting="samples"
        )
        for step in range(8):
            inputs, targets = zoo.batch("mixed", 6, seed=2 * step + rank)
            zoo.loss(model, inputs, targets).backward()
            server.step()
        ends_equal(server)
        assert not torch.equal(before[0], next(model.parameters()))


def replayed(start: nn.Module, log: list, lr: float) -> nn.Module:
    """Apply a log in one process that has the rows of all sites."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    versions = [bits(model)]
    for decision in [decision for decision in log if decision.entries]:
        worker = copy.deepcopy(start)
        weights = [entry.samples * entry.scale for entry in decision.entries]
        for entry, weight in zip(decision.entries, weights, strict=True):
            with torch.no_grad():
                for parameter, value in zip(worker.parameters(), versions[entry.base], strict=True):
                    parameter.copy_(value)
            inputs, targets = batch(entry.number, entry.site, entry.samples)
            loss = nn.functional.cross_entropy(worker(inputs.double()), targets)
            (loss * weight / sum(weights)).backward()
        for parameter, other in zip(model.parameters(), worker.parameters(), strict=True):
            parameter.grad = other.grad
        optimizer.param_groups[0]["lr"] = lr * sum(weights) / sum(entry.samples for entry in decision.entries)
        optimizer.step()
        versions.append(bits(model))
    return model


def follows_its_log(mode: str, options: dict, hooked: int = -1) -> dict:
    """Train, and compare with the log; the optimizer of one site may have a hook that reads the gradients."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start = network().double()
    model = copy.deepcopy(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    if rank == hooked:
        optimizer.register_step_pre_hook(lambda *_: seen.append([each.grad is not None for each in model.parameters()]))
    server = dadplug.ParameterServer(model, optimizer, mode=mode, rank=3, **{"weighting": "samples"} | options)
    weights = {layer.weight for layer in model if isinstance(layer, nn.Linear)}
    fused = options["staleness"] > 0 and hooked < 0  # else all sites form the gradients, as one of them has to
    assert (weights <= server._optimizer.fused) if fused else not server._optimizer.fused
    log, formed, write = recorded(server), set(), server._gradients.write

    def record_formed(gradients):
        formed.update(name for names in gradients.values() for name in names)
        write(gradients)

    server._gradients.write = record_formed
    pauses, steps = random.Random(rank), 0
    for phase in range(2):
        for _ in range(8 + 4 * rank + 4 * phase):
            inputs, targets = batch(steps, rank, 5 + (steps + rank) % 3)
            nn.functional.cross_entropy(model(inputs.double()), targets).backward()
            time.sleep(0.01 * pauses.random())
            server.step()
            assert all(parameter.grad is None for parameter in model.parameters())
            steps += 1
        server.finish()
        assert server.first_difference() is None
        statistics = server.gather_objects({name: buffer.clone() for name, buffer in model.named_buffers()})
        assert all(torch.equal(each[name], statistics[0][name]) for each in statistics for name in each)
    logs = server.gather_objects([[tuple(entry) for entry in decision.entries] for decision in log])
    assert all(each == logs[0] for each in logs)
    dropped = [key for decision in log for key in decision.dropped]
    counts = server.gather_objects(steps)
    everything = [(site, number) for site in range(world_size) for number in range(counts[site])]
    assert sorted(keys(log) + dropped) == everything
    assert server.dropped == sum(site == rank for site, _ in dropped)
    if mode != "rankdad":
        expected = replayed(start, log, 0.01)
        for (name, one), other in zip(expected.named_parameters(), model.named_parameters(), strict=True):
            assert torch.allclose(one, other[1], rtol=0, atol=1e-10), name
    factored = {name for name, parameter in model.named_parameters() if parameter in weights}
    assert bool(factored - formed) == (fused and mode != "dsgd")  # rankdad sends the gradients of small layers
    assert all(map(all, seen))
    assert bool(seen) == (rank == hooked)
    if fused:
        optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="before the ParameterServer is made"):
            server._optimizer.step(server._optimizer.settings(), 1.0, {})
    server.detach()
    ages = [decision.version - 1 - entry.base for decision in log for entry in decision.entries]
    return {"oldest": max(ages), "together": max(len(decision.entries) for decision in log), "dropped": len(dropped)}


def test_replicas_follow_one_log(sites):
    for mode in ("dsgd", "dad", "rankdad"):
        found = sites(3).run(follows_its_log, mode, {"staleness": 4})
        assert 0 < found[0]["oldest"] <= 4
    found = sites(3).run(follows_its_log, "dad", {"staleness": 2, "quorum": 2, "late": "keep"}, 1)
    assert found[0]["oldest"] <= 2 <= found[0]["together"]
    found = sites(3).run(follows_its_log, "dad", {"staleness": 0, "quorum": 2, "late": "drop"})
    assert found[0]["oldest"] == 0 < found[0]["dropped"]


def made(model: nn.Module | None = None, **options) -> tuple[nn.Module, torch.optim.Optimizer, dadplug.ParameterServer]:
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, dadplug.ParameterServer(model, optimizer, mode="dad", **{"weighting": "samples"} | options)


def backward(model: nn.Module, step: int = 0, factor: float = 1.0) -> None:
    inputs, targets = batch(step, dist.get_rank())
    (nn.functional.cross_entropy(model(inputs), targets) * factor).backward()


@support.at_sites(2)
def test_what_is_not_possible_is_an_error_at_every_site() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    refuses(
        (lambda: made(quorum=9), f"quorum=9 needs as many sites, and there are {world_size}"),
        (lambda: made(merge="owner"), "has no option 'merge'"),
        (
            lambda: made(staleness=2 + rank),
            r"option staleness is 2 at site 0 .* and 3 at site 1",
            dadplug.MismatchError,
        ),
    )
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.1 + 0.1 * rank}]
    with pytest.raises(dadplug.MismatchError, match=r"lr of parameter group 1 is 0.1 at site 0 .* and 0.2 at site 1"):
        dadplug.ParameterServer(model, torch.optim.SGD(groups, lr=0.1), weighting="samples")
    table = nn.Embedding(4, 4, max_norm=1.0)
    refuses(
        (
            lambda: dadplug.ParameterServer(table, torch.optim.SGD(table.parameters(), lr=0.1), weighting="samples"),
            "max_norm",
        ),
        (lambda: dadplug.ParameterServer(model, torch.optim.LBFGS(model.parameters()), weighting="samples"), "LBFGS"),
        (
            lambda: dadplug.ParameterServer(model[0], torch.optim.SGD(model.parameters(), lr=0.1), weighting="samples"),
            "not the model's",
        ),
    )
    model, optimizer, server = made(model)
    with pytest.raises(RuntimeError, match=r"server.step\(\) makes the optimizer's steps"):
        optimizer.step()
    before = bits(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    inputs, targets = batch(0, rank)
    scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
    with pytest.raises(ValueError, match="cannot train with a GradScaler"):
        server.step()
    backward(model, factor=float("nan") if rank else 1.0)
    refused = pytest.raises(dadplug.NonFiniteError, match="NaN or Inf in the gradient of")
    with refused if rank else contextlib.nullcontext():
        server.step()
    server.finish()  # of one contribution, that of site 0
    assert server.version == 1
    assert server.first_difference() is None
    assert all(not torch.equal(one, other) for one, other in zip(before, bits(model), strict=True))
    model[3].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="the model has changed"):
        backward(model)
    server.detach()
    server.detach()
    optimizer.step()


class Counting(torch.optim.SGD):
    """Statistics of its steps among the settings of a group, as in Prodigy and schedule-free optimizers."""

    def step(self, closure=None):
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


@support.at_sites(2)
def test_an_optimizer_whose_steps_change_its_settings_is_refused() -> None:
    model = network()
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["count"] = 0
    server = dadplug.ParameterServer(model, optimizer)
    backward(model)
    with pytest.raises(ValueError, match=r"cannot use Counting, whose step changes settings of its .* \(count\)"):
        server.step() or server.finish()
    server.detach()


@support.at_sites(2)
def test_what_one_site_asks_for_is_an_error_at_every_site() -> None:
    rank = dist.get_rank()
    own = network(rank)  # other values at each site: nothing has changed before an error
    before = bits(own)
    everything = [{"params": own.parameters()}]
    parts = [{"params": own[0].parameters()}, {"params": own[1:].parameters()}]
    with pytest.raises(dadplug.MismatchError, match="parameter group 0 of the optimizer"):
        dadplug.ParameterServer(own, torch.optim.SGD(parts if rank else everything, lr=0.1), weighting="samples")
    for wrong, message in (  # at one site
        ({"mode": "edad"}, "'edad' recomputes"),
        ({"mode": "powersgd"}, "'powersgd' sums"),
        ({"staleness": 1.5}, "staleness must be a whole number"),
        ({"deal": "mine"}, "unknown deal 'mine'"),
    ):
        with pytest.raises(ValueError, match=message):
            dadplug.ParameterServer(
                own, torch.optim.SGD(own.parameters(), lr=0.1), **(wrong if rank else {}), weighting="samples"
            )
    with pytest.raises(dadplug.MismatchError, match=r"option deal is 'own' at site 0 .* and 'shared' at site 1"):
        dadplug.ParameterServer(
            own, torch.optim.SGD(own.parameters()), deal="shared" if rank else "own", weighting="samples"
        )
    assert all(torch.equal(one, other) for one, other in zip(before, bits(own), strict=True))


@support.at_sites(2)
def test_what_a_site_sends_is_checked_by_the_others() -> None:
    rank = dist.get_rank()
    for value in (float("nan"), 1e30):
        model, _, server = made()
        encode = ContributionCodec._encode_rows

        def lie(*given: object, value: float = value, encode: Callable = encode) -> tuple:
            left, *rest = encode(*given)
            return torch.full_like(left, value), *rest

        def steps(model: nn.Module = model, server: dadplug.ParameterServer = server) -> None:
            for step in range(60):  # until what the other site has sent arrives
                backward(model, step)
                server.step()

        try:
            ContributionCodec._encode_rows = lie if rank else encode
            with pytest.raises(dadplug.MismatchError, match=r"the contribution of site 1 .* whose products overflow"):
                steps()
        finally:
            ContributionCodec._encode_rows = encode
        assert all(each.isfinite().all() for each in model.parameters())
        server.detach()


@support.at_sites(3)
def test_a_process_may_order_and_evaluate_only() -> None:
    """Process 0 only orders and evaluates: late, when the workers have ended two further phases."""
    rank = dist.get_rank()
    role = "worker" if rank else "server"
    refuses(
        (lambda: made(quorum=3, role=role), "quorum=3 needs as many sites, and there are 2"),
        (lambda: made(role="server"), "no process has role='worker'"),
        (lambda: made(role="boss"), "unknown role 'boss'"),
    )
    model, _, server = made(role=role, staleness=2)
    found = []

    def train() -> None:
        for step in range(5 * (rank > 0)):
            backward(model, step + 5 * len(found))
            server.step()
        server.finish()
        found.append((server.version, {name: value.clone() for name, value in model.state_dict().items()}))

    train()
    if rank:
        train()
        train()
        dist.barrier()
    else:
        with pytest.raises(RuntimeError, match="takes no steps"):
            server.step()
        dist.barrier()
        train()
        train()
    for own, other in zip(found, server.gather_objects(found)[1], strict=True):
        assert own[0] == other[0]
        assert all(torch.equal(value, other[1][name]) for name, value in own[1].items())
    assert found[0][0] < found[1][0] < found[2][0]
    server.detach()


def loses_a_site(lost: int, staleness: int) -> str:
    rank = dist.get_rank()
    model, _, server = made(staleness=staleness, timeout=60.0)
    log = recorded(server)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(24):
            if step == 9 and rank == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(model, step)
            server.step()
        server.finish()
    assert lost not in server.present_sites
    committed = keys(log)
    own = [(rank, number) for number in range(server._log._count)]  # fewer than steps where the link was busy
    assert [key for key in committed if key[0] == rank] == own
    assert len(set(committed)) == len(committed)
    assert not [key for key in committed if key[0] == lost and key[1] >= 9]
    total = sum(float(parameter.double().sum()) for parameter in model.parameters())
    server.detach()
    return f"{committed} {total!r} {[str(each.message) for each in caught]}"


def check_others_go_on(group: support.Sites, staleness: int) -> None:
    """Check that two sites apply the same log after the third was killed."""
    group.start(loses_a_site, 2, staleness)
    first, second, third = group.outcomes()
    assert third.kind == "ended"
    assert first.kind == second.kind == "ok", first.value + second.value
    assert first.value == second.value  # the same log, the same parameters
    assert "site 2" in first.value
    assert "has left, and the others go on" in first.value


@pytest.mark.parametrize("staleness", [0, 3])
def test_the_others_go_on_without_a_killed_site(staleness):
    with support.Sites(3) as group:
        check_others_go_on(group, staleness)


def test_the_site_of_the_sequencer_is_named_if_it_is_lost():
    with support.Sites(3) as group:
        group.start(loses_a_site, 0, 2)
        _, *others = group.outcomes()
    for outcome in others:
        assert outcome.kind == "failed"
        assert "SiteError: site 0" in outcome.value
        assert "it has the sequencer" in outcome.value


# Steps: when contributions leave, and what a site that leaves early is told


def sends_before_it_applies(staleness: int) -> tuple[list[int], list[int], int]:
    """Return the contributions sent by each commit, the versions that were reported, and that of the second step."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    server = dadplug.ParameterServer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), staleness=staleness, gather=0, weighting="samples"
    )
    sent, reported = [], []
    apply, send = server._apply, server._log.send

    def apply_later(commit) -> None:
        sent.append(server._log._count)
        apply(commit)

    def report(kind, *fields, **named) -> None:
        if kind is FrameKind.REACHED:
            reported.append(named["reached"])
        send(kind, *fields, **named)

    model(torch.randn(3, 6)).sum().backward()
    server.step()
    while not server._log._commits and not server.version:
        server._log.wait()
    server._apply, server._log.send = apply_later, report
    model(torch.randn(3, 6)).sum().backward()
    server.step()
    found = list(sent), list(reported), server.version
    ends_equal(server)
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
    server = dadplug.ParameterServer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), staleness=100, weighting="samples"
    )
    server._log._delayed = lambda: True
    for _ in range(7):
        model(torch.randn(3, 6)).sum().backward()
        server.step()
    found = server._log._count, server._held.batches
    ends_equal(server)
    return found


def test_a_busy_link_holds_so_many_batches_at_most():
    with support.Sites(2) as group:
        assert group.run(holds_some_batches) == [(2, 1)] * 2


def leaves_early(leaves: bool) -> tuple[list[str], list[str]]:
    """What site 0 is told where site 1 leaves the phase without `finish`, and what site 1 itself is told."""
    model = nn.Linear(4, 3)
    server = dadplug.ParameterServer(
        model, torch.optim.SGD(model.parameters(), 0.1), mode="dsgd", staleness=2, weighting="samples"
    )
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


# Batch normalisation by the statistics that sites have committed: against one process, discarded passes, checks


SETTLED = 6  # steps with the same batches and parameters until all statistics are those of these


def normalised() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv1d(2, 5, 3),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(20, 7),
        nn.BatchNorm1d(7, affine=False),
        nn.Tanh(),
        nn.Linear(7, 3),
    ]
    return nn.Sequential(*layers).double()


def normalised_batch(rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the batch of a site, of another distribution and size than those of others."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    rows = 4 + 3 * rank
    inputs = torch.randn(rows, 2, 6, generator=generator, dtype=torch.float64) * (1 + rank) + 2 * rank
    return inputs, torch.randint(3, (rows,), generator=generator)


def in_one_process(world_size: int, weighting: str) -> nn.Module:
    """Return the network after a step of one process on all rows."""
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, targets = zip(*(normalised_batch(rank) for rank in range(world_size)), strict=True)
    losses = nn.functional.cross_entropy(model(torch.cat(inputs)), torch.cat(targets), reduction="none")
    by_site = losses.split([len(each) for each in targets])
    if weighting == "samples":
        losses.mean().backward()
    else:
        torch.stack([each.mean() for each in by_site]).mean().backward()
    optimizer.step()
    return model


def settles(weighting: str, discards: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    server = dadplug.ParameterServer(
        model, optimizer, mode="dad", staleness=0, sync_batchnorm=True, weighting=weighting, average_buffers=False
    )
    inputs, targets = normalised_batch(rank)
    for step in range(SETTLED + 1):
        if discards:
            nn.functional.cross_entropy(model(normalised_batch(rank, 5)[0] * 9.0), targets).backward()
        if discards == "before":
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if discards == "between":
            optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.5 if step == SETTLED else 0.0
        server.step()
    ends_equal(server)
    expected = in_one_process(world_size, weighting)
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12), f"{weighting}, {discards}: {name}"
    assert "forward" not in vars(model[1])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_step_is_that_of_one_process_once_statistics_have_settled(sites, world_size):
    for weighting, discards in itertools.product(("samples", "uniform"), ("", "before", "between")):
        sites(world_size).run(settles, weighting, discards)


@support.at_sites(2)
def test_running_statistics_are_those_of_all_rows() -> None:
    """Running statistics are those of all sites' rows, as long as parameters and batches stay the same."""
    rank = dist.get_rank()
    model, momentum = normalised(), 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    server = dadplug.ParameterServer(
        model, optimizer, mode="dad", staleness=0, sync_batchnorm=True, weighting="samples"
    )
    inputs, targets = normalised_batch(rank)
    for _ in range(2):
        before = model[1].running_mean.clone(), model[1].running_var.clone()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        server.step()
    rows = model[0](torch.cat([normalised_batch(each)[0] for each in range(2)])).detach().transpose(0, 1).flatten(1)
    moved = before[0].lerp(rows.mean(1), momentum), before[1].lerp(rows.var(1), momentum)
    assert torch.allclose(model[1].running_mean, moved[0], rtol=0, atol=1e-12)
    assert torch.allclose(model[1].running_var, moved[1], rtol=0, atol=1e-12)
    model.eval()
    plain = nn.functional.batch_norm(model[0](inputs), *moved, model[1].weight, model[1].bias)
    assert torch.allclose(model[1](model[0](inputs)), plain, rtol=0, atol=1e-12)
    ends_equal(server)


@support.at_sites(2)
def test_a_resumed_training_has_the_same_curve() -> None:
    """A resumed training has the same curve, since the statistics of other sites are in the state."""
    rank = dist.get_rank()
    kept: dict = {}
    finals = []
    for resumed in (False, True):
        model = normalised()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if resumed:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        options = {"mode": "dad", "staleness": 0, "sync_batchnorm": True, "average_buffers": False}
        server = dadplug.ParameterServer(model, optimizer, **{"weighting": "samples"} | options)
        if resumed:
            server.load_state_dict(kept["server"])
            model.load_state_dict(kept["model"])  # buffers of this site: the start takes those of site 0
        for step in range(3 if resumed else 0, 6):
            inputs, targets = normalised_batch(rank, step)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            server.step()
            if step == 2:
                server.finish()
                kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "server": server.state_dict()}
                kept = torch.utils._pytree.tree_map(lambda each: each.clone() if torch.is_tensor(each) else each, kept)
        server.finish()
        finals.append(model.state_dict())
        server.detach()
    for name, value in finals[0].items():
        assert torch.equal(value, finals[1][name]), name


@support.at_sites(2)
def test_statistics_of_a_batch_with_nan_are_not_sent() -> None:
    rank = dist.get_rank()
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    server = dadplug.ParameterServer(model, optimizer, mode="dad", sync_batchnorm=True, weighting="samples")
    for step in range(6):
        inputs, targets = normalised_batch(rank, step)
        bad = rank == 1 and step in (2, 4)
        loss = nn.functional.cross_entropy(model(inputs * float("nan") if bad else inputs), targets)
        loss.backward()
        if bad and step == 2:
            optimizer.zero_grad()
        elif bad:
            with pytest.raises(NonFiniteError):
                server.step()
        else:
            server.step()
    server.finish()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert server.first_difference() is None
    norms = server._norms
    assert norms is not None
    states = server.gather_objects({site: packed for site, (_, packed) in norms.state_dict().items()})
    assert sorted(states[0]) == sorted(states[1]) == [0, 1]
    for site, name in itertools.product((0, 1), ("1", "5")):
        assert torch.equal(states[0][site][name], states[1][site][name])
    server.detach()


def made_with_batch_norm() -> CommittedBatchNorms:
    model = normalised()
    return CommittedBatchNorms(model, 0, 2, SampleCounter(model, lambda: None, lambda: None, True), True, 4)


def test_statistics_are_checked():
    norms = made_with_batch_norm()
    fine = {"1": torch.ones(22), "5": torch.ones(30)}
    assert norms.check(fine) is fine
    problems = {
        "missing": None,
        "'7', which is no": {"7": torch.ones(22)},
        "'1' are no numbers": {"1": torch.ones(22, dtype=torch.int32)},
        "'5' are not 30": {"5": torch.ones(22)},
        "'1' are not 22 finite": {"1": torch.full((22,), torch.inf)},
        "'1' are not possible": {"1": -torch.ones(22)},
    }
    for message, packed in problems.items():
        with pytest.raises(ValueError, match=message):
            norms.check(packed)


def test_statistics_of_a_silent_site_expire():
    norms, inputs = made_with_batch_norm(), normalised_batch(0)[0]
    layer = norms._layers["1"]
    rows = nn.Conv1d(2, 5, 3).double()(inputs)
    alone = layer(rows)
    other = torch.cat([torch.full((5,), 3.0), torch.full((5,), 40.0), torch.tensor([20.0, 5.0]), torch.zeros(10)])
    norms.follow(1, {"1": other}, 1)
    for norms.version in (1, 4):
        assert not torch.allclose(layer(rows), alone)
    norms.version = 5
    assert torch.equal(layer(rows), alone)
    norms.follow(0, {"1": other}, 5)  # a site's own rows are those of its batch
    assert torch.equal(layer(rows), alone)


def test_a_server_that_could_not_be_made_does_not_disturb_the_report_of_an_exit(monkeypatch):
    monkeypatch.setattr(server_module, "open_log", Mock(side_effect=SiteError("site 1 (b) is gone")))
    model = nn.Linear(4, 3)
    with pytest.raises(SiteError) as kept:  # its traceback holds the server
        dadplug.ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    announce(str(kept.value))


def calls_differently(leads: bool) -> str:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    server = dadplug.ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=60)
    model(torch.ones(4, 4)).sum().backward()
    server.step()
    with pytest.raises(dadplug.MismatchError) as error:
        server.average_buffers() if leads == (server.site_rank == 0) else server.finish()
    return str(error.value)


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("over_hub", [False, True])
def test_sites_that_make_different_calls_are_told_both(tmp_path, leads, over_hub):
    hub = running_hub(tmp_path / "kits") if over_hub else contextlib.nullcontext()
    with hub, support.Sites(2, kits=[tmp_path / "kits" / name for name in "ab"] if over_hub else ()) as group:
        for message in group.run(calls_differently, leads, timeout=30):
            assert re.search(r"site 0 \(.*\) is in .*, step 0, and site 1 \(.*\) is in .*, step 0", message)
