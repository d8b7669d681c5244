"""Tests of the generator of noise, by itself."""

import builtins
import math
import multiprocessing

import pytest
import torch
from scipy import stats
from torch import nn

import dadplug
from dadplug import DifferentialPrivacy
from dadplug.privacy import noise
from dadplug.privacy.masks import word_stream
from dadplug.privacy.noise import add_noise


def drawn(count, deviation=1.0, dtype=torch.float32, **options):
    tensor = torch.zeros(count, dtype=dtype)
    add_noise([tensor], deviation, **options)
    return tensor.double() / deviation


def assert_standard_normal(numbers):
    """Check the distribution by moments, by its whole shape, and neighbours for independence, also of magnitudes."""
    count = numbers.numel()
    for power, moment, of_squares in ((1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105), (6, 15, 10395)):
        spread = math.sqrt((of_squares - moment**2) / count)
        assert float((numbers**power).mean()) == pytest.approx(moment, abs=5.5 * spread), power
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-6
    for lag in (1, 2, 8, 1 << 13, 1 << 14):  # the last two: partners of a pair, and the next block
        if lag < count // 2:
            for values in (numbers, numbers**2 - 1):
                product = values[lag:] * values[:-lag]
                assert abs(float(product.mean())) < 5.5 * float(values.var()) / math.sqrt(len(product)), lag


@pytest.mark.parametrize(
    ("count", "options"),
    [(3_000_000, {}), (100_000, {"dtype": torch.float64}), (60_000, {"secure": True})],
    ids=["float32", "float64", "secure"],
)
def test_noise_is_standard_normal_and_independent(count, options):
    assert_standard_normal(drawn(count, 2.5, **options))


def test_noise_without_cryptography_is_standard_normal(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert_standard_normal(drawn(300_000))


def test_extreme_bits_make_finite_numbers_within_the_stated_range():
    extremes = torch.tensor([0, -1, 1, -(2**31), 2**31 - 1, 2**30, -(2**30), 3], dtype=torch.int32)
    first, second = (each.flatten().numpy() for each in torch.meshgrid(extremes, extremes, indexing="ij"))
    one, other = torch.zeros(2, len(first)).numpy()
    noise._add_normal(one, other, first, second, 1.0, 1.0, torch.empty(2, len(first)).numpy())
    bits = torch.from_numpy(first).double()
    uniform = (torch.from_numpy(first & 0x7FFFFFFF).double() * 2.0**-31 + 2.0**-32).clamp(max=1)
    radius = torch.sqrt(-2 * torch.log(uniform))
    turned = torch.from_numpy((second << 1).astype("int32")).double() * 2.0**-31 * math.pi / 4 + math.pi / 4
    expected = torch.where(bits >= 0, 1, -1) * radius * torch.cos(turned)
    torch.testing.assert_close(torch.from_numpy(one).double(), expected, atol=1e-4, rtol=1e-5)
    expected = torch.where(torch.from_numpy(second) >= 0, 1, -1) * radius * torch.sin(turned)
    torch.testing.assert_close(torch.from_numpy(other).double(), expected, atol=1e-4, rtol=1e-5)
    assert float(radius.max()) == pytest.approx(6.66, abs=0.01)


@pytest.mark.parametrize("count", [1, 2, 3, 5, (1 << 14) - 1, (1 << 14) + 1, 3 * (1 << 14) + 7])
def test_every_element_gets_noise_and_the_values_are_kept(count):
    tensor = torch.full((count,), 2000.0)
    add_noise([tensor], 1.0, scale=0.5)
    noise = tensor.double() - 1000
    assert bool((noise != 0).double().mean() > 0.99)
    assert float(noise.abs().max()) < 0.5 * 7
    if count > 1000:
        assert float(noise.std()) == pytest.approx(0.5, rel=0.05)
    before = tensor.clone()
    add_noise([tensor], 0.0, scale=2.0)
    assert torch.equal(tensor, 2 * before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("turned", [False, True])
def test_noise_of_each_type_and_layout(dtype, turned):
    tensor = torch.zeros(300, 200, dtype=dtype)
    add_noise([tensor.T if turned else tensor], 3.0)
    numbers = tensor.double() / 3
    assert float(numbers.mean()) == pytest.approx(0, abs=5.5 / math.sqrt(60_000))
    assert float(numbers.var()) == pytest.approx(1, abs=0.05)


def test_threads_and_calls_draw_different_noise(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        numbers = drawn(8 * 32 * (1 << 14))
    finally:
        torch.set_num_threads(threads)
    blocks = numbers.view(-1, 1 << 14)
    assert len({tuple(each[:4].tolist()) for each in blocks}) == len(blocks)
    assert float((blocks[0] * blocks[1:]).mean(1).abs().max()) < 6 / 128
    assert not torch.equal(numbers[:100], drawn(100))


def send_noise(pipe):
    pipe.send(drawn(8).tolist())


def test_forked_processes_draw_different_noise():
    context = multiprocessing.get_context("fork")
    found = [drawn(8).tolist()]
    for _ in range(2):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=send_noise, args=(sending,))
        process.start()
        assert receiving.poll(60)
        found.append(receiving.recv())
        process.join(60)
    assert len({tuple(each) for each in found}) == 3


def test_words_are_those_of_aes_in_counter_mode():
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key, place = bytes(range(32)), bytes(range(12))
    plain = Cipher(algorithms.AES(key), modes.CTR(place + bytes([0, 0, 0, 2]))).encryptor().update(bytes(400_004))
    draw = word_stream(key, place, 70_001)
    assert b"".join(draw(count).tobytes() for count in (1, 7, 70_000, 29_993)) == plain


# Noise in every number that a site sends, over 10,000 steps: mean, variance, distribution, independence

STEPS = 10_000
SIGMAS = 5.5


def sends(secure, site, steps=STEPS):
    """Return what a site puts into its bucket, without the clipped gradients in it, in units of the deviation."""
    torch.manual_seed(7)
    model = nn.Linear(5, 3)
    inputs, targets = torch.randn(4, 5), torch.randint(0, 3, (4,))
    settings = {"max_grad_norm": 1.5, "sample_rate": 0.1, "expected_batch": 4 + site, "secure": secure}
    exact = dadplug.GradientReduction(model, "dsgd", privacy=DifferentialPrivacy(0.0, **settings))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    exact.synchronize()
    clipped = {name: each.grad.flatten() * (4 + site) for name, each in model.named_parameters()}
    exact.detach()
    reduction = dadplug.GradientReduction(model, "dsgd", compare_every=0, privacy=DifferentialPrivacy(2.0, **settings))
    reduction.idle()  # makes the plan
    (handler,) = reduction._planner._reducer._handlers
    names, sent, launch = [unit.name for unit in handler.units], [], handler.bucket.launch

    def launched():
        sent.append(torch.cat([handler.bucket._parts[handler._slots[name]] for name in names]))
        launch()

    handler.bucket.launch = launched
    for step in range(steps):
        model.zero_grad()
        if step % 10 == 1:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            reduction.synchronize()
        else:  # an empty batch
            reduction.idle()
    assert len(sent) == steps
    payloads = torch.stack(sent).double() * (4 + site)  # gradients times the site's share of the samples, which is 1
    payloads[1::10] -= torch.cat([clipped[name] for name in names])
    return payloads / 3.0


def check(noise):
    """Check that the columns and the rows are independent standard normal numbers."""
    steps = len(noise)
    assert float(noise.mean(0).abs().max()) < SIGMAS / math.sqrt(steps)
    assert float((noise.var(0) - 1).abs().max()) < SIGMAS * math.sqrt(2 / steps)
    assert abs(float(noise.var()) - 1) < SIGMAS * math.sqrt(2 / noise.numel())
    sizes = (noise.square() - 1) / math.sqrt(2)  # whose products have longer tails
    for values, spread in ((noise, 1.0), (sizes, 2.0)):
        for lag in (0, 1, 2, 7):
            products = values[lag:].T @ values[: steps - lag] / (steps - lag)
            if not lag:
                products.fill_diagonal_(0.0)
            assert float(products.abs().max()) < SIGMAS * spread / math.sqrt(steps - lag), lag
    sorted_, _ = noise.flatten().sort()
    expected = torch.special.ndtr(sorted_)
    found = torch.arange(1, len(sorted_) + 1).double() / len(sorted_)
    assert float((expected - found).abs().max()) < math.sqrt(-math.log(1e-7 / 2) / 2 / len(sorted_))


@pytest.mark.parametrize(("secure", "steps"), [(False, STEPS), (True, STEPS // 5)])
def test_noise_in_every_sent_number(secure, steps):
    one = sends(secure, 0, steps)
    assert one.shape == (steps, 18)
    check(one)
    if not secure:
        other = sends(secure, 1, 2000)
        check(torch.cat([one[:2000], other], 1))  # sites draw independently


def test_wrong_noise_is_found():
    right = torch.randn(STEPS, 18).double()
    check(right)
    wrong = right.clone()
    wrong[:, 3] *= 1.05
    again = right.clone()
    again[1::2, 4] = again[::2, 4]
    for each in (wrong, again, right + 0.06, torch.cat([right[:, :1], right[:, 1:-1], right[:, :1]], 1)):
        with pytest.raises(AssertionError):
            check(each)
