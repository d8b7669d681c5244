"""Private gradients that are formed while they are compressed."""

import pytest
import torch
from dadplug.hooks import Factor
from torch import nn

import dadplug
from dadplug.privacy.noise import FormedSum, Noise, TableSum, UnformedGradient


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
