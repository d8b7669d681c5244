"""Private layers: the gradients of the others, and errors of patterns."""

import copy

import pytest
import support
import torch
import torch.distributed as dist
from support import refuses
from torch import nn

from dadplug import (
    DifferentialPrivacy,
    DistributedDataParallel,
    GradientReduction,
    LocalSGD,
    ParameterServer,
    remaining_epochs_until,
)
from dadplug.errors import MismatchError, NonFiniteError
from dadplug.exchange import codec
from dadplug.parameter_server import launch_ps_and_workers
from dadplug.step.model_sync.private import (
    SharedPart,
    keeping_private,
    load_joined_state,
    load_shared_state,
    private_state,
    shared_state,
)
from dadplug.step.model_sync.sameness import frozen_digests, load_tensors, tensors_of

SITES = 2


class Net(nn.Module):
    """A shared body with a normalisation, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 20))
        self.chain = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 30))
        self.head = nn.Linear(30, classes)

    def forward(self, inputs):
        return self.head(torch.tanh(self.chain(torch.tanh(self.body(inputs)))))


def net(site: int) -> Net:
    """The model of a site, in float64: its head and its statistics are its own, all else is equal."""
    torch.manual_seed(5)
    model = Net().double()
    with torch.no_grad():
        model.head.weight.add_(site)
        model.body[1].running_mean.add_(site)
    return model


def backward(model: nn.Module, site: int, step: int) -> None:
    """Go backward through the loss of a site's batch."""
    generator = torch.Generator().manual_seed(100 * step + site)
    inputs = torch.randn(6, 5, generator=generator, dtype=torch.float64) + site
    nn.functional.cross_entropy(model(inputs), torch.randint(0, 3, (6,), generator=generator)).backward()


PRIVATE = ("head.*", "body.1.*")


def is_private(name: str) -> bool:
    return name.startswith(("head.", "body.1."))


@pytest.mark.parametrize("mode", ["dsgd", "dad", "edad", "auto", "rankdad", "powersgd", "topk"])
@support.at_sites(2)
def test_shared_gradients_are_those_of_one_process(mode: str) -> None:
    rank, lossy = dist.get_rank(), mode in ("rankdad", "powersgd", "topk")
    every = [net(site) for site in range(SITES)]  # one process with all rows, and each site's private layers
    model = copy.deepcopy(every[rank])
    options = {"rank": 40, "tolerance": 0.0, "wire": "fp32"} if mode == "rankdad" else {"rank": 40}
    options = {"density": 1.0} if mode == "topk" else options if lossy else {}
    options |= {"merge": "owner"} if mode == "rankdad" else {"hierarchy": [[0, 1]]} if mode == "dad" else {}
    reduction = GradientReduction(model, mode=mode, private=PRIVATE, sync_batchnorm=mode == "dad", **options)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, *every)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for site, each in enumerate(every):
            backward(each, site, step)
        backward(model, rank, step)
        reduction.synchronize()
        for (name, own), *others in zip(model.named_parameters(), *(each.parameters() for each in every)):
            shared = not is_private(name)
            expected = sum(each.grad for each in others) / SITES if shared else others[rank].grad
            torch.testing.assert_close(own.grad, expected, rtol=1e-7, atol=1e-10, msg=f"step {step}: {name}")
            if shared:
                for each in others:
                    each.grad.copy_(own.grad)
        for optimizer in optimizers:
            optimizer.step()
    reduction.average_buffers()
    torch.testing.assert_close(model.state_dict(), every[rank].state_dict(), rtol=1e-7, atol=1e-9)
    assert reduction.first_difference() is None
    rows = {row.parameter: row for row in reduction.plan}
    assert {name for name, row in rows.items() if row.path == "private"} == {name for name in rows if is_private(name)}
    assert rows["head.weight"].bytes == 0 < rows["body.0.weight"].bytes
    reduction.detach()


def train(exchange, model, optimizer, steps: int, *, local: bool = False) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, dist.get_rank(), step)
        if local:
            exchange.step()
        else:
            exchange.synchronize()
            optimizer.step()


@pytest.mark.parametrize("options", [{"overlap": False}, {"overlap": True, "fragments": 2}, {"fused": True}])
@support.at_sites(2)
def test_local_steps_agree_on_what_is_shared(options: dict) -> None:
    """At an agreement without overlap, shared parameters are the mean, and private ones those of the site alone."""
    rank = dist.get_rank()
    every = [net(site) for site in range(SITES)]
    model = copy.deepcopy(every[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    local = LocalSGD(model, optimizer, every=2, private=PRIVATE, **options)
    train(local, model, optimizer, 2, local=True)
    alone = []
    for site, each in enumerate(every):
        own = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            own.zero_grad()
            backward(each, site, step)
            own.step()
        alone.append(each.state_dict())
    local.finish()
    for name, value in model.state_dict().items():
        private = is_private(name)
        expected = alone[rank][name] if private else sum(each[name] for each in alone) / SITES
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-8, msg=name)
    local.detach()


@support.at_sites(2)
def test_heads_may_have_different_shapes_and_settings() -> None:
    """Heads for other classes, an optimizer and a group with another rate, and one that is frozen at one site."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net(classes=3 + rank).double()
    shared, own = [*model.body.parameters(), *model.chain.parameters()], [*model.head.parameters()]
    reduction = GradientReduction(model, "dad", private="head.*", compare_every=1)
    own_groups = [{"params": shared}, {"params": own[:1], "lr": 0.1 + rank}]
    optimizers = torch.optim.SGD(own_groups, lr=0.1), torch.optim.SGD(own[1:], lr=0.1 + rank)
    for step in range(4):
        if step == 2 and rank:
            model.head.requires_grad_(False)
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, rank, step)
        reduction.synchronize()
        for optimizer in optimizers:
            optimizer.step()
    assert reduction.first_difference() is None
    reduction.detach()


@support.at_sites(2)
def test_private_gradients_are_clipped_by_themselves() -> None:
    rank = dist.get_rank()
    model = net(rank)
    with torch.no_grad():
        model.head.weight.mul_(1 + 9 * rank)  # local gradients of very different norms
    reduction = GradientReduction(model, "dad", private=PRIVATE, compare_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        backward(model, rank, step)
        norms.append(float(reduction.clip_grad_norm_(0.01)))
        reduction.apply(optimizer)
    assert norms[0] > 0.01
    assert reduction.gather_objects(norms)[0] == norms
    assert reduction.first_difference() is None
    reduction.detach()


@pytest.mark.parametrize("check_finite", [True, False])
@support.at_sites(2)
def test_all_sites_leave_out_a_step_with_nan_in_a_private_gradient(check_finite: bool) -> None:
    rank = dist.get_rank()
    model = net(rank)
    reduction = GradientReduction(model, "dsgd", private="head.*", check_finite=check_finite)
    backward(model, rank, 0)
    if rank:
        model.head.weight.grad[0, 0] = float("nan")
    if check_finite:
        with pytest.raises(NonFiniteError, match=r"at site 1 .* in the gradient of 'a private layer'"):
            reduction.synchronize()
    else:
        reduction.synchronize()
        assert not model.head.weight.grad.isfinite().any()  # at both sites
    reduction.detach()


@support.at_sites(2)
def test_sites_with_other_patterns_are_refused() -> None:
    patterns = ("head.*",) if dist.get_rank() else ()
    message = r"option private is \(\) at site 0.* and \('head\.\*',\) at site 1"
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refuses(
        (lambda: GradientReduction(model, "dsgd", private=patterns), message),
        (lambda: LocalSGD(model, optimizer, private=patterns), message),
        (lambda: ParameterServer(model, optimizer, private=patterns), message),
        error=MismatchError,
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.table.weight


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Net, {"private": "haed.*"}, r"no parameter or buffer matches 'haed\.\*'.*'body\.0\.weight'"),
        (Net, {"private": ("head.*", "nothing")}, "no parameter or buffer matches 'nothing'"),
        (Net, {"private": "*"}, "leaves no trained parameter for the sites to share"),
        (Net, {"private": ""}, "private must be a pattern of names or a tuple of them"),
        (Net, {"private": (1,)}, "private must be a pattern of names or a tuple of them"),
        (Tied, {"private": "out.*"}, r"'out\.weight' and 'table\.weight' are one tensor"),
        (
            Net,
            {
                "private": "head.*",
                "privacy": DifferentialPrivacy(noise_multiplier=1.0, sample_rate=0.1, expected_batch=8),
            },
            "privacy= does not go with private=",
        ),
        (Net, {"private": "head.*", "state": {"model": nn.Linear(1, 1)}}, "state of 'model' .Linear. would be sent"),
    ],
)
def test_what_does_not_fit_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        GradientReduction(make(), "dsgd", **options)


class Lookahead(torch.optim.SGD):
    """Slow weights beside the state of single parameters, as optimizers of libraries have them."""

    def state_dict(self):
        slow = [each.detach() for group in self.param_groups for each in group["params"]]
        return super().state_dict() | {"slow": slow}


def test_an_optimizer_with_weights_beside_its_entries_is_refused():
    model = Net()
    with pytest.raises(ValueError, match=r"state of 'optimizer' .Lookahead. has slow besides what belongs to single"):
        GradientReduction(model, "dsgd", private="head.*", state={"optimizer": Lookahead(model.parameters(), lr=0.1)})
    shared = Lookahead([*model.body.parameters(), *model.chain.parameters()], lr=0.1)
    GradientReduction(model, "dsgd", private="head.*", state={"optimizer": shared}).detach()


def groups(model: nn.Module, site: int) -> list[dict]:
    """Shared parameters and those of the norm, and the private head with a learning rate of the site."""
    return [
        {"params": [*model.body.parameters(), *model.chain.parameters()]},
        {"params": [*model.head.parameters()], "lr": 0.01 * (1 + site)},
    ]


@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad"])
@support.at_sites(2)
def test_steps_of_a_parameter_server_are_those_of_one_process(mode: str) -> None:
    """Without staleness: shared layers by the mean over sites, private ones by the gradient of the site."""
    rank = dist.get_rank()
    every = [net(site) for site in range(SITES)]  # one process with all rows, and each site's private layers
    model = copy.deepcopy(every[rank])
    for each in every:
        each.load_state_dict(
            {name: value for name, value in every[0].state_dict().items() if not is_private(name)}, strict=False
        )
    optimizer, *optimizers = [
        torch.optim.Adam(groups(each, site), lr=0.02) for each, site in ((model, rank), *zip(every, range(SITES)))
    ]
    clipped = []
    for each in (optimizer, *optimizers):
        each.register_step_pre_hook(
            lambda optimizer, *_: clipped.append(
                nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.05)
            )
        )
    options = {"rank": 40, "tolerance": 0.0, "wire": "fp32"} if mode == "rankdad" else {}
    server = ParameterServer(
        model, optimizer, mode=mode, staleness=0, private=PRIVATE, average_buffers=False, **options
    )
    for step in range(3):
        for site, each in enumerate(every):
            backward(each, site, step)
        backward(model, rank, step)
        server.step()
        gradients = [{name: each.grad for name, each in one.named_parameters()} for one in every]
        for private in (True, False):  # a step each
            for site, one in enumerate(every):
                for name, each in one.named_parameters():
                    mean = sum(own[name] for own in gradients) / SITES
                    each.grad = (
                        None if is_private(name) is not private else gradients[site][name].clone() if private else mean
                    )
                optimizers[site].step()
                one.zero_grad()
        torch.testing.assert_close(model.state_dict(), every[rank].state_dict(), rtol=1e-6, atol=1e-9)
    assert len(clipped) == 3 * 2 * (1 + SITES)
    server.finish()
    assert server.first_difference() is None
    others = server.gather_objects(model.head.weight.detach())
    assert not torch.equal(*others)
    server.detach()


@support.at_sites(2)
def test_nan_in_a_private_gradient_is_found_before_a_contribution_is_sent() -> None:
    model = net(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    server = ParameterServer(model, optimizer, mode="dsgd", private="head.*", quorum=1, staleness=2)
    own = model.head.weight.detach().clone()
    backward(model, dist.get_rank(), 0)
    if dist.get_rank():
        model.head.weight.grad[0, 0] = float("nan")
        with pytest.raises(NonFiniteError, match="in the gradient of 'a private layer' of this site"):
            server.step()
    else:
        server.step()
    server.finish()
    assert server.version == 1  # of site 0
    assert torch.equal(model.head.weight, own) == bool(dist.get_rank())
    assert server.first_difference() is None
    server.detach()


def test_an_optimizer_keeps_its_own_state_of_private_layers():
    states = []
    for site in range(2):
        model = net(site)
        part = SharedPart(model, ("head.*",))
        optimizer = torch.optim.Adam(groups(model, site), lr=0.1 + site)
        optimizer.state["all"] = {"mean": model.head.weight.detach().mean()}  # belongs to no parameter
        backward(model, site, 0)
        optimizer.step()
        states.append((part, optimizer, private_state(part, [optimizer])))
    (_, donor, _), (part, joiner, own) = states
    sent = shared_state(donor)
    names = [name for name, _ in part.whole.named_parameters()]
    assert {names[number] for number in sent["state"]} == {name for name in names if not name.startswith("head.")}
    assert sent["param_groups"][1] == {"params": sent["param_groups"][1]["params"]}
    with pytest.raises(ValueError, match="the state of Adam has 'all', which belongs to no parameter"):
        load_joined_state(joiner, sent)
    load_shared_state(joiner, sent)
    assert [group["lr"] for group in joiner.param_groups] == [0.1, 0.02]
    after = private_state(part, [joiner])
    assert own["optimizers"][0]
    torch.testing.assert_close(after, own, rtol=0, atol=0)
    assert shared_state(joiner)["state"].keys() == sent["state"].keys()
    torch.testing.assert_close(shared_state(joiner)["state"], sent["state"], rtol=0, atol=0)


def test_a_checkpoint_of_another_site_leaves_settings_of_private_layers_alone():
    """Also what belongs to no parameter; a private group's rate comes from the file of this site."""
    model = net(0)
    part, optimizer = SharedPart(model, ("head.*",)), torch.optim.Adam(groups(model, 0), lr=0.1)
    optimizer.state["all"] = {"count": 3}
    kept = private_state(part, [optimizer])
    optimizer.param_groups[1]["lr"], optimizer.state["all"] = 7.0, {"count": 5}
    whole = optimizer.state_dict()
    whole["param_groups"] = [{**group, "lr": 5.0} for group in whole["param_groups"]]
    with keeping_private(part, [optimizer], lambda: kept):
        optimizer.load_state_dict(whole)
    assert [group["lr"] for group in optimizer.param_groups] == [5.0, kept["groups"][0][1]["lr"]]
    assert optimizer.state["all"] == {"count": 3}


def test_servers_in_experiments_and_checkpoints_that_are_sent_have_no_private_layers():
    model = Net()
    reduction = GradientReduction(model, "dsgd", private="head.*")
    state = {"model": model, "reduction": reduction}
    refuses(
        (
            lambda: launch_ps_and_workers(2, 1, 0, [], [], private="head.*"),
            "private= does not go with launch_ps_and_workers",
        ),
        (
            lambda: remaining_epochs_until(3, checkpoint="run.ckpt", state=state),
            "'reduction' has private=: leave that out",
        ),
    )
    reduction.detach()


@support.at_sites(2)
def test_a_wrapped_model_keeps_its_statistics() -> None:
    """As torch's class, it replaces the buffers of all sites by those of rank 0 before each forward pass."""
    model = net(dist.get_rank())
    wrapped = DistributedDataParallel(model, "dsgd", private="body.1.*")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped.join():
        for step in range(3 + dist.get_rank()):  # site 1 has a batch more
            optimizer.zero_grad()
            backward(wrapped, dist.get_rank(), step)
            optimizer.step()
    statistics = wrapped.reduction.gather_objects(
        [each.clone() for each in (*model.body[1].parameters(), model.body[1].running_mean)]
    )
    assert all(not torch.equal(first, second) for first, second in zip(*statistics, strict=True))
    assert wrapped.reduction.first_difference() is None
    wrapped.reduction.detach()


@support.at_sites(2)
def test_an_optimizer_that_mixes_gradients_needs_another_one_for_private_layers() -> None:
    model = net(dist.get_rank())
    reduction = GradientReduction(model, "dsgd", private="head.*")
    backward(model, dist.get_rank(), 0)
    reduction.synchronize()
    with pytest.raises(ValueError, match="give these an optimizer of their own"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
    reduction.detach()


@support.at_sites(2)
def test_only_frozen_weights_that_differ_are_sent() -> None:
    """At the start those of site 1 that differ become site 0's; a site that joins gets those, and what has changed."""
    rank = dist.get_rank()
    model = net(0)
    model.body.requires_grad_(False)
    with torch.no_grad():
        model.body[3].bias.add_(rank)
    reduction = GradientReduction(model, "dsgd")
    own = net(0)
    torch.testing.assert_close(model.state_dict(), own.state_dict(), rtol=0, atol=0)
    model.chain[0].requires_grad_(False)  # after the start
    with torch.no_grad():
        model.body[0].weight.add_(1.0)
    state = reduction._join_state(0, None)
    frozen = {"body.0.bias", "body.1.weight", "body.1.bias", "body.3.weight"}
    assert state.frozen.keys() == frozen
    assert state.tensors.keys() == model.state_dict().keys() - frozen
    load_tensors(tensors_of(own), state.tensors, frozen=state.frozen)
    torch.testing.assert_close(model.state_dict(), own.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        own.body[3].weight.add_(1.0)
        own.head.weight.zero_()
    with pytest.raises(MismatchError, match=r"the frozen parameter 'body\.3\.weight' \[20, 40\] is not that"):
        load_tensors(tensors_of(own), state.tensors, frozen=state.frozen)
    assert not own.head.weight.any()  # nothing has changed
    reduction.detach()


class Block(nn.Module):
    """A block of a transformer's names and shapes, with adapters of rank 8."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        names = ("query", "key", "value", "attention_output", "intermediate", "output")
        self.backbone = nn.ModuleDict({name: nn.Linear(width, width) for name in names}).requires_grad_(False)
        self.lora_A = nn.ModuleDict({name: nn.Linear(width, 8, bias=False) for name in ("query", "value")})
        self.lora_B = nn.ModuleDict({name: nn.Linear(8, width, bias=False) for name in ("query", "value")})

    def forward(self, inputs):
        for name, layer in self.backbone.items():
            added = self.lora_B[name](self.lora_A[name](inputs)) if name in self.lora_A else 0.0
            inputs = torch.tanh(layer(inputs) + added)
        return inputs


def test_the_state_of_adapters_is_adapters_and_their_optimizers_state():
    """Names, digests of frozen parameters, plan and options take less than what compressing exponents saves."""
    model = nn.Sequential(*(Block() for _ in range(12)))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    reduction = GradientReduction(model, "rankdad", state={"optimizer": optimizer})
    reduction._frozen = frozen_digests(model)  # as where all sites have had them
    model(torch.randn(3, 256)).square().mean().backward()
    reduction.synchronize()
    optimizer.step()
    state = reduction._donate()
    content = codec.encode(state, compact=True)
    found = codec.decode(content)
    assert found.description == state.description
    assert found.frozen == state.frozen == frozen_digests(model)
    assert found.plan == state.plan
    assert 2.3 < len(content) / (4 * sum(map(torch.numel, trained))) < 2.8
    reduction.detach()
