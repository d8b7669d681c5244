"""Private gradients against sums of the clipped gradients of single samples, computed one by one in float64."""

import argparse
import copy
import math

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from dadplug.hooks import Factor
from single_samples import by_backward, check_clipped_sums, off, reduce, sum_of_sites
from support import refuses
from torch import nn

import dadplug
from dadplug import DifferentialPrivacy
from dadplug.privacy.noise import FormedSum, Noise, TableSum, UnformedGradient
from dadplug.tools.cli import add_option_arguments


class Twice(nn.Module):
    """A layer that is called twice, and a bias that is shared with another one's weight gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.last(self.first(self.first(x).tanh()).tanh())


class Tied(nn.Module):
    """A table that is also the output layer, with a row for padding; positions have one row, or no dimension more."""

    def __init__(self, padding=None, shape=(-1,)):
        super().__init__()
        self.shape = shape
        self.words, self.places = nn.Embedding(11, 8, padding_idx=padding), nn.Embedding(5, 8)
        self.norm, self.middle = nn.LayerNorm(8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        places = torch.arange(words.shape[1]).view(self.shape)
        x = self.words(words) + self.places(places)
        return self.head(x + self.middle(self.norm(x)).relu())


class Turned(nn.Module):
    """The convolution of GPT-2, whose weight is transposed."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.first, self.last = Conv1D(7, 5), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh().mean(1))


def images(rows):
    return torch.randn(rows, 4, 6, 6, dtype=torch.float64), torch.randint(0, 3, (rows,))


def vectors(rows):
    return torch.randn(rows, 6, dtype=torch.float64), torch.randint(0, 3, (rows,))


def sequences(rows):
    return torch.randn(rows, 9, 5, dtype=torch.float64), torch.randint(0, 3, (rows,))


def words(rows):
    found = torch.randint(0, 11, (rows, 5))
    found[:, 1] = found[:, 0]  # a word that occurs twice in a sample
    return found, torch.randint(0, 11, (rows, 5))


def by_class(model, inputs, targets):
    return nn.functional.cross_entropy(model(inputs), targets)


def by_word(model, inputs, targets):
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def pooled(*layers):
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(3))


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.RMSNorm(9), nn.Linear(9, 3)), vectors, by_class),
    "called twice": (Twice, vectors, by_class),
    "convolution": (
        lambda: pooled(nn.Conv2d(4, 6, 3, 2, 1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 4, 3, bias=False)),
        images,
        by_class,
    ),
    "groups": (lambda: pooled(nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=2), nn.ReLU()), images, by_class),
    "transposed": (
        lambda: pooled(nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.InstanceNorm2d(6, affine=True), nn.Tanh()),
        images,
        by_class,
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(5, 30), nn.LayerNorm((9, 30)), nn.Tanh(), nn.Flatten(), nn.Linear(270, 3)),
        sequences,
        by_class,
    ),
    "long sequence of a small layer": (
        lambda: nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)),
        sequences,
        by_class,
    ),
    "tied": (Tied, words, by_word),
    "tied with padding": (lambda: Tied(3, (1, -1)), words, by_word),
    "conv1d of transformers": (Turned, sequences, by_class),
}


def build(name):
    make, draw, loss = CASES[name]
    torch.manual_seed(1)
    model = make().double()
    model.train()
    with torch.no_grad():
        model(draw(2)[0])
    return model, draw, loss


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_clipped_sums_are_those_of_single_samples(name, reduction):
    model, draw, loss = build(name)
    batch = draw(7)
    check_clipped_sums(model, loss, batch, by_backward(model, loss, batch), reduction).detach()


def test_micro_batches_add_up_and_discarded_ones_do_not():
    model, draw, loss = build("convolution")
    reduction = reduce(model, 0.3)
    batches = [draw(3), draw(5), draw(2)]
    loss(model, *batches[2]).backward()
    model.zero_grad()  # it is discarded
    with reduction.no_sync():
        loss(model, *batches[0]).backward()
    with pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError(loss(model, *batches[2]))  # a forward pass without a backward pass
    loss(model, *batches[1]).backward()
    reduction.synchronize()
    assert off(model, sum_of_sites(build("convolution")[0], loss, batches[:2], 0.3), 4) < 1e-7
    model.zero_grad()
    reduction.synchronize()  # an empty batch
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    reduction.detach()
    loss(model, *batches[0]).backward()  # trains alone again
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_samples_with_nan_are_left_out(caplog):
    model, draw, loss = build("mlp")
    inputs, targets = draw(5)
    reduction = reduce(model, 0.3, loss_reduction="sum")
    spoilt = inputs.clone()
    spoilt[2] = math.nan
    nn.functional.cross_entropy(model(spoilt), targets, reduction="sum").backward()
    reduction.synchronize()
    rest = [0, 1, 3, 4]
    assert off(model, sum_of_sites(build("mlp")[0], loss, [(inputs[rest], targets[rest])], 0.3), 4) < 1e-7
    assert "samples whose gradients hold NaN or Inf are left out" in caplog.text


def test_noise_of_two_sites_and_of_a_copy_differs():
    models = [nn.Linear(3, 2) for _ in range(2)]
    reductions = [dadplug.GradientReduction(each, "dsgd", privacy=DifferentialPrivacy()) for each in models]
    torch.manual_seed(0)
    reductions[0].idle()
    torch.manual_seed(0)
    reductions[1].idle()
    assert not torch.equal(models[0].weight.grad, models[1].weight.grad)
    state = torch.get_rng_state()
    reductions[0].idle()
    assert torch.equal(state, torch.get_rng_state())
    assert "seed" not in str(reductions[0].state_dict()["privacy"])


def trains_at_two_sites(mode):
    options = {"rank": 3} if mode == "rankdad" else {}
    rank = dist.get_rank()
    model, draw, loss = build("tied")
    reference = copy.deepcopy(model)
    torch.manual_seed(5)
    both = [draw(6), draw(3)]
    privacy = DifferentialPrivacy(0.0, 0.2, 0.1, 8 if rank else 4)
    reduction = dadplug.GradientReduction(model, mode=mode, privacy=privacy, **options)
    loss(model, *both[rank]).backward()
    reduction.synchronize()
    wanted = torch.cat([each.flatten() / 12 for each in sum_of_sites(reference, loss, both, 0.2).values()])

    def error(steps: int) -> float:
        return off_by(torch.cat([each.grad.flatten() for each in model.parameters()]), wanted * steps)

    first = error(1)
    if mode == "dsgd":
        assert first < 1e-10
    else:  # what the rank leaves out comes with later steps
        assert 0.01 < first < 0.9
        sent = [parameter.grad.clone() for parameter in model.parameters()]
        for _ in range(9):
            model.zero_grad()
            loss(model, *both[rank]).backward()
            reduction.synchronize()
            for total, parameter in zip(sent, model.parameters()):
                parameter.grad = total.add_(parameter.grad).clone()
        assert error(10) < 0.4 * first
    noisy = dadplug.GradientReduction(copy.deepcopy(reference), mode=mode, privacy=DifferentialPrivacy(), **options)
    optimizer = torch.optim.Adam(noisy.model.parameters(), 1e-2)
    for step in range(4):
        optimizer.zero_grad()
        if step != 2 or rank == 0:
            loss(noisy.model, *both[rank]).backward()
        noisy.synchronize()
        optimizer.step()
    assert noisy.first_difference() is None
    assert noisy.contributors == [0, 1]  # a site with an empty batch, too
    return str(noisy.plan), reduction.traffic.bytes_sent


@pytest.mark.parametrize("mode", ["dsgd", "rankdad"])
def test_sites_agree_on_the_sum_over_expected_batches(sites, mode):
    plan, _ = sites(2).run(trains_at_two_sites, mode)[0]
    assert ("lowrank" in plan) == (mode == "rankdad")
    assert "factors" not in plan


def test_epsilon_is_opacuss_and_goes_on_after_a_resumption():
    accountants = pytest.importorskip("opacus.accountants")
    privacy = DifferentialPrivacy(1.1, 1.0, 0.02, 4)
    model = nn.Linear(3, 2)
    reduction = dadplug.GradientReduction(model, "dsgd", privacy=privacy)
    assert reduction.epsilon(1e-5) == 0
    for _ in range(30):
        reduction.idle()
    state = reduction.state_dict()
    again = dadplug.GradientReduction(copy.deepcopy(model), "dsgd", privacy=DifferentialPrivacy(1.3, 1.0, 0.02, 4))
    again.load_state_dict(state)
    for _ in range(10):
        again.idle()
    accountant = accountants.PRVAccountant()
    accountant.history = [(1.1, 0.02, 30), (1.3, 0.02, 10)]
    assert again.epsilon(1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)
    assert again.epsilon(1e-5) > reduction.epsilon(1e-5) > 0
    lost = dadplug.GradientReduction(nn.Linear(3, 2), "dsgd", privacy=privacy)
    lost.load_states([None, state])  # this site's own state is missing: it may have made all steps
    assert lost.epsilon(1e-5) == pytest.approx(reduction.epsilon(1e-5), rel=1e-6)
    found = DifferentialPrivacy.for_epsilon(3.0, 1e-5, 0.02, 200, max_grad_norm=0.5)
    accountant.history = [(found.noise_multiplier, 0.02, 200)]
    assert 2.9 < accountant.get_epsilon(1e-5) <= 3.0
    assert found.max_grad_norm == 0.5
    clipping = dadplug.GradientReduction(nn.Linear(3, 2), "dsgd", privacy=DifferentialPrivacy(0.0))
    clipping.idle()
    assert clipping.epsilon(1e-5) == math.inf


def test_bad_values():
    refuses(
        (lambda: DifferentialPrivacy(noise_multiplier=-1.0), "noise_multiplier must be"),
        (lambda: DifferentialPrivacy(noise_multiplier=math.nan), "noise_multiplier must be"),
        (lambda: DifferentialPrivacy(max_grad_norm=0.0), "max_grad_norm must be"),
        (lambda: DifferentialPrivacy(sample_rate=0.0), "sample_rate must be"),
        (lambda: DifferentialPrivacy(sample_rate=1.5), "sample_rate must be"),
        (lambda: DifferentialPrivacy(expected_batch=0), "expected_batch must be"),
        (lambda: DifferentialPrivacy(loss_reduction="none"), "unknown loss_reduction 'none'"),
        (lambda: DifferentialPrivacy(secure=1), "secure must be"),
    )


def test_settings_on_a_command_line(capsys):
    found = DifferentialPrivacy.parse("noise_multiplier=1.5, expected_batch=8,secure=True")
    assert found == DifferentialPrivacy(1.5, expected_batch=8, secure=True)
    with pytest.raises(ValueError, match="unknown setting 'noise'"):
        DifferentialPrivacy.parse("noise=1")
    parser = argparse.ArgumentParser()
    add_option_arguments(parser)
    assert parser.parse_args(["--privacy", "noise_multiplier=1.5"]).option_privacy == DifferentialPrivacy(1.5)
    with pytest.raises(SystemExit):
        parser.parse_args(["--privacy", "noise=1"])
    assert "unknown setting 'noise' of privacy; valid ones are noise_multiplier" in capsys.readouterr().err


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.place = nn.Linear(3, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.layer(x) + self.place


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), {}, r"1 \(BatchNorm1d\) mixes the samples.*nn\.GroupNorm"),
        (Own(), {}, "is not known for place: freeze it"),
        (nn.LSTMCell(3, 3), {}, "is not known for weight_ih"),
        (nn.Embedding(4, 2, scale_grad_by_freq=True), {}, r"weight \(scale_grad_by_freq counts the lookups"),
        (nn.Linear(3, 3), {"mode": "dad"}, "privacy= goes with mode='dsgd' or 'rankdad'"),
        (nn.Linear(3, 3), {"mode": "topk"}, "privacy= goes with mode"),
        (nn.Linear(3, 3), {"sync_batchnorm": True}, "does not go with sync_batchnorm"),
        (nn.Linear(3, 3), {"privacy": 1.0}, "privacy must be a DifferentialPrivacy"),
    ],
)
def test_what_would_show_more_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        dadplug.GradientReduction(model, **{"mode": "dsgd", "privacy": DifferentialPrivacy()} | options)


def test_what_is_seen_only_in_a_step_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    reduction = dadplug.GradientReduction(model, mode="dsgd", privacy=DifferentialPrivacy())
    rows = torch.randn(4, 3)
    refuses((lambda: (model(rows) - model(-rows)).sum().backward(), "two forward passes"), error=RuntimeError)
    reduction._private.discard()
    tied, draw, _ = build("tied")
    _kept = dadplug.GradientReduction(tied, mode="dsgd", privacy=DifferentialPrivacy())
    turned = dadplug.GradientReduction(Turns(), mode="dsgd", privacy=DifferentialPrivacy())
    alone = "has not come through a call of its layer alone"
    refuses(
        (lambda: (model(rows) @ model[2].weight).sum().backward(), alone),
        (lambda: reduction.noise, "estimates of the gradient's noise"),
        (lambda: tied(draw(5)[0]), "cannot tell numbers of positions"),
        (
            lambda: turned.model(torch.randn(4, 5, 3)).sum().backward(),
            "samples along the first dimension: the batch has 4",
        ),
        (
            lambda: dadplug.GradientReduction(nn.Linear(2, 2), mode="dsgd").epsilon(1e-5),
            "epsilon\\(\\) needs privacy",
            ValueError,
        ),
        error=RuntimeError,
    )


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x.transpose(0, 1))


@support.at_sites(2)
def test_a_wrapped_model_accumulates():
    rank, (model, draw, loss) = dist.get_rank(), build("mlp")
    torch.manual_seed(5)
    both = [draw(6), draw(3)]
    wanted = sum_of_sites(model, loss, both, 0.2)
    wrapped = dadplug.DistributedDataParallel(model, mode="dsgd", privacy=DifferentialPrivacy(0.0, 0.2, 0.1, 4))
    with wrapped.no_sync():
        loss(wrapped, *both[rank]).backward()
    loss(wrapped, *both[rank]).backward()
    assert off(model, wanted, 8 / 2) < 1e-10
    assert wrapped.reduction._private.ledger.entries == [(0.0, 0.1, 1, 1)]


# Private gradients that are formed while they are compressed


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Words(nn.Module):
    """A table, linear layers with one row and with many rows a sample, and a convolution."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(900, 160)
        self.wide, self.mixing = nn.Linear(160, 500), nn.Conv1d(500, 200, 3, padding=1)
        self.head = nn.Linear(200, 400)

    def forward(self, words):
        x = self.wide(self.words(words)).tanh()
        return self.head(self.mixing(x.mT).tanh().mean(2))


def train(late, dtype, micro_batches=1, idle=()):
    """Return the gradients of some steps without noise, and the last error memory."""
    torch.manual_seed(0)
    model = Words().to(dtype)
    privacy = dadplug.DifferentialPrivacy(0.0, 1.0, 0.1, 4)
    reduction = dadplug.GradientReduction(model, mode="rankdad", rank=8, privacy=privacy)
    if not late:
        reduction._private.may_wait = tuple
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        for _ in range(0 if step in idle else micro_batches):
            words = torch.randint(900, (4, 18))
            nn.functional.cross_entropy(model(words), torch.arange(4)).backward()
            words.zero_()  # which a loader may do
        reduction.synchronize()
        found.append([each.grad.clone() for each in model.parameters()])
        optimizer.step()
    waited = reduction._planner.forms_late()
    assert waited == ({"words.weight", "wide.weight", "mixing.weight", "head.weight"})
    memory = reduction._method.errors.state_dict()["errors"]
    reduction.detach()
    return found, memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"idle": (2, 3)}])
def test_gradients_are_those_that_are_formed_before(dtype, options):
    (late, late_memory), (early, early_memory) = (train(each, dtype, **options) for each in (True, False))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    for these, those in zip(late, early):
        for one, other in zip(these, those):
            assert float((one - other).norm()) <= tolerance * float(other.norm())
    assert any(bool(each.any()) for each in late_memory.values())
    for name, memory in early_memory.items():
        assert float((late_memory[name] - memory).norm()) <= tolerance * float(memory.norm())


def test_cleared_gradients_are_not_sent():
    torch.manual_seed(0)
    model = Words()
    privacy = dadplug.DifferentialPrivacy(0.0, 1.0, 0.1, 4)
    reduction = dadplug.GradientReduction(model, mode="rankdad", rank=8, memory_decay=0.0, privacy=privacy)
    for clears in (False, False, True):
        model.zero_grad()
        model(torch.randint(900, (4, 18))).square().mean().backward()
        if clears:
            assert reduction._private._waiting
            model.zero_grad()
        reduction.synchronize()
    assert not any(bool(each.grad.any()) for each in model.parameters() if each.grad is not None)
    reduction.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [None, 0.5])
def test_noise_of_blocks_is_normal_and_independent(dtype, share):
    rows, width, memory = 300, 401, None if share is None else torch.full((300, 401), 8.0, dtype=dtype)
    sums = torch.full((rows, width), 10.0, dtype=dtype)
    made = torch.full((2, rows, width), torch.nan, dtype=dtype)
    for each in made:
        gradient = UnformedGradient(FormedSum(sums), Noise(3.0, scale=0.5), rows)
        for start in range(0, rows, 13):
            some = slice(start, start + 13)
            gradient.write(some, each[some], None if memory is None else memory[some], 0.0 if share is None else share)
    noise = (made.double() - 5.0 - (0.0 if share is None else 4.0)) / 1.5
    count = noise[0].numel()
    assert abs(float(noise.mean())) < 5 / (2 * count) ** 0.5
    assert abs(float(noise.square().mean()) - 1) < 5 * (2 / (2 * count)) ** 0.5
    for one, other in ((noise[0], noise[1]), (noise[:, :-13], noise[:, 13:]), (noise[..., :-1], noise[..., 1:])):
        assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5


def test_each_block_is_formed_once():
    gradient = UnformedGradient(FormedSum(torch.ones(10, 3)), Noise(0.0), 10)
    block = torch.empty(4, 3)
    gradient.write(slice(0, 4), block)
    for rows in (slice(0, 4), slice(5, 9)):
        with pytest.raises(RuntimeError, match="of which 4 are formed"):
            gradient.write(rows, block)
    assert torch.equal(block, torch.ones(4, 3))


def test_a_table_adds_up_its_lookups():
    numbers, deltas = torch.tensor([5, 0, 5, 2, 7]), torch.randn(5, 3)
    expected = torch.zeros(8, 3).index_add_(0, numbers, deltas)
    table, made = TableSum(numbers, deltas, 8), torch.full((8, 3), torch.nan)
    for start in range(0, 8, 3):
        table.write(slice(start, start + 3), made[start : start + 3])
    assert torch.allclose(made, expected)


def test_a_factor_that_is_not_formed_forms_its_gradient():
    total = torch.randn(6, 2, 2)

    def unformed():
        gradient = UnformedGradient(FormedSum(total.view(6, 4)), Noise(0.0), 6)
        return Factor.unformed((6, 2, 2), total, gradient.write)

    assert torch.equal(unformed().gradient(), total)
    assert torch.equal(unformed().settled().gradient(), total)
    assert unformed().rows == unformed().settled().rows
    assert bool(unformed().deltas.isnan().all())
