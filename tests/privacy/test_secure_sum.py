"""Secure sums: masks cancel, a payload alone is uniform, the sum is that of plain privacy, and the noise is shared."""

import copy
import math
import pickle
from functools import partial

import numpy as np
import pytest
import support
import torch
import torch.distributed as dist
from support import refuses
from torch import nn

import dadplug
from dadplug import DifferentialPrivacy, PrivacyError
from dadplug.errors import MismatchError
from dadplug.options import Options
from dadplug.privacy.masks import PairwiseKeys, add_mask, encode
from dadplug.privacy.mechanism import Ledger
from dadplug.privacy.secure_sum import SecureSum

SHARED = DifferentialPrivacy(1.0, 0.5, 0.1, 4, secure_sum=True)
CLIPPED = DifferentialPrivacy(0.0, 0.5, 0.1, 4, secure_sum=True)
NAMES = {0: "berlin", 1: "lyon", 2: "oslo", 3: "turin"}


def keys(sites):
    pairs = [PairwiseKeys(rank) for rank in range(sites)]
    for one in pairs:
        for rank, other in enumerate(pairs):
            if other is not one:
                one.derive(rank, NAMES[rank], other.public, NAMES[pairs.index(one)])
    return pairs


def chi_square(content):
    """Return the deviation of the bytes from a uniform distribution, in standard deviations of chi-square."""
    counts = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
    expected = counts.sum() / 256
    return (float(((counts - expected) ** 2 / expected).sum()) - 255) / math.sqrt(2 * 255)


def test_masks_cancel_and_are_used_once():
    pairs = keys(4)
    count = 3_000_001  # more than a piece of a stream
    members = (0, 1, 3)
    masks = [pairs[rank].mask(members, 5, 0, count) for rank in members]
    assert not (masks[0] + masks[1] + masks[2]).any()
    assert masks[0].any()
    for mask in masks:
        assert abs(chi_square(mask.tobytes())) < 6
    once = masks[0][:1000]
    for other in (
        pairs[0].mask(members, 6, 0, 1000),
        pairs[0].mask(members, 5, 1, 1000),
        keys(4)[0].mask(members, 5, 0, 1000),
    ):
        assert np.count_nonzero(other == once) < 5
    assert np.array_equal(pairs[0].mask(members, 5, 0, 1000), once)
    assert np.array_equal(pairs[0].mask((0, 1), 5, 0, 9), 0 - pairs[1].mask((0, 1), 5, 0, 9))
    renamed = PairwiseKeys(0)
    renamed.derive(1, "not lyon", pairs[1].public, NAMES[0])
    pairs[1].derive(0, NAMES[0], renamed.public, NAMES[1])
    assert not np.array_equal(renamed.mask((0, 1), 0, 0, 9), 0 - pairs[1].mask((0, 1), 0, 0, 9))  # bound to names
    assert pickle.loads(pickle.dumps(pairs[0])).public != pairs[0].public
    with pytest.raises(PrivacyError, match="lyon has sent a public key for secure_sum that is not valid"):
        renamed.derive(1, NAMES[1], bytes(32), NAMES[0])


def test_fixed_point_numbers_cannot_overflow():
    numbers = encode(torch.tensor([-1.0, 0.49, 0.75, 100.0]), 0.5, 3)
    assert numbers.tolist() == [-2, 1, 2, 200]
    most = (2**31 - 1) // 3
    assert int(encode(torch.tensor([float(most)], dtype=torch.float64), 1.0, 3)) == most
    total = sum(int(encode(torch.tensor([float(most)], dtype=torch.float64), 1.0, 3)) for _ in range(3))
    assert total <= 2**31 - 1
    for wrong in (most + 1.0, math.nan, math.inf):
        with pytest.raises(PrivacyError, match="are batches larger than expected_batch"):
            encode(torch.tensor([wrong], dtype=torch.float64), 1.0, 3)
    masked = add_mask(torch.tensor([2**31 - 1, -5], dtype=torch.int32), np.array([1, 2**32 - 1], np.uint32))
    assert masked.tolist() == [-(2**31), -6]


class Sites:
    """Secure sums of some sites, with what they announce passed on by hand."""

    def __init__(self, count, privacy):
        self.parameter = nn.Parameter(torch.zeros(50))
        self.ledgers = [Ledger() for _ in range(count)]
        self.sums = [SecureSum(privacy, ledger, rank) for rank, ledger in enumerate(self.ledgers)]

    def step(self, values, present, abstain=(), lost=()):
        """Return the sum of a step from the sites that are present, the number of exchanges, and what they sent."""
        for rank in present:
            self.sums[rank].begin_step({self.parameter: values[rank]}, abstains=rank in abstain)
        payloads, announced = {}, {}
        for rank in present:
            members = self.sums[rank].planned(present)
            payloads[rank] = self.masked(rank, members)
            announced[rank] = self.sums[rank].announcement(members)
        stay = tuple(rank for rank in present if rank not in lost)
        announced = {rank: announced[rank] for rank in stay}
        settled = {self.sums[rank].hear(announced, NAMES) for rank in stay}
        assert len(settled) == 1
        if settled == {True}:
            return sum(payloads[rank] for rank in stay), 1, payloads
        again = {rank: self.masked(rank, stay) for rank in stay}
        return sum(again.values()), 2, again

    def masked(self, rank, members):
        return self.sums[rank].masked(members, 0, [self.parameter], torch.device("cpu"))


@pytest.mark.parametrize("number", [1 << 41, 1 << 62, (1 << 64) - 1])
def test_one_site_cannot_use_up_the_numbers_of_exchanges(number):
    """The others would go on after it, and refuse each other."""
    sites = Sites(3, CLIPPED)
    announced = {rank: secure.announcement(()) for rank, secure in enumerate(sites.sums)}
    announced[1] = announced[1][:33] + number.to_bytes(8, "big") + announced[1][41:]
    for secure in sites.sums:
        assert [*secure.invalid(announced, NAMES)] == [1]
        with pytest.raises(PrivacyError, match=f"{NAMES[1]} announces exchange {number}"):
            secure.hear(announced, NAMES)
        assert secure.hear({rank: each for rank, each in announced.items() if rank != 1}, NAMES) is not None
        assert secure._next < 10


def test_a_site_that_leaves_or_comes_leads_to_new_masks_and_parts_of_the_noise():
    sites = Sites(4, CLIPPED)
    values = [torch.randn(50) for _ in range(4)]

    def total(*ranks):
        return torch.stack([torch.round(values[rank].double() / sites.sums[0].unit) for rank in ranks]).sum(0).int()

    for present, lost, wanted, exchanges in [
        ((0, 1, 2, 3), (), (0, 1, 2, 3), 2),  # nobody has keys in the first step
        ((0, 1, 2, 3), (), (0, 1, 2, 3), 1),
        ((0, 1, 2, 3), (2,), (0, 1, 3), 2),
        ((0, 1, 3), (), (0, 1, 3), 1),
        ((0, 1, 2, 3), (), (0, 1, 2, 3), 2),  # it is back
        ((0, 1, 2, 3), (), (0, 1, 2, 3), 1),
    ]:
        found, count, _ = sites.step(values, present, lost=lost)
        assert torch.equal(found, total(*wanted))
        assert count == exchanges
    sites.sums[1] = SecureSum(CLIPPED, Ledger(), 1)  # a new process
    found, count, _ = sites.step(values, (0, 1, 2, 3))
    assert torch.equal(found, total(0, 1, 2, 3))
    assert count == 2
    # Steps of 4, of 3 after a loss, of 4 since the return; before, the new process is not known by the others' masks.
    assert [(each.steps, each.sites) for each in sites.ledgers[0].entries] == [(3, 4), (2, 3), (4, 4)]
    with pytest.raises(PrivacyError, match="needs at least 3 sites in a step, and there are 2"):
        sites.step(values, (0, 1, 2), lost=(2,))


def test_what_a_site_sends_is_uniform_and_never_the_same():
    sites, values = Sites(3, SHARED), [torch.zeros(50) for _ in range(3)]
    sent = []
    for _ in range(200):
        _, _, payloads = sites.step(values, (0, 1, 2))
        sent.append(payloads[1].numpy().tobytes())
    assert abs(chi_square(b"".join(sent))) < 6
    assert len(set(sent)) == 200
    plain, values[1] = b"".join(sent[:20]), torch.full((50,), 7.0)
    sent = [sites.step(values, (0, 1, 2))[2][1].numpy().tobytes() for _ in range(200)]
    assert abs(chi_square(b"".join(sent))) < 6
    assert plain not in b"".join(sent)
    again = [sites.masked(0, (0, 1, 2)) for _ in range(2)]  # of one bucket, for the same sites
    assert int((again[0] == again[1]).sum()) < 3


@pytest.mark.parametrize("count", [3, 4])
def test_the_noise_of_a_sum_is_as_stated(count):
    sites, values = Sites(count, SHARED), [torch.zeros(50) for _ in range(count)]
    present = tuple(range(count))
    drawn = [sites.step(values, present, abstain=(1,))[0].double() * sites.sums[0].unit for _ in range(600)]
    noise = torch.stack(drawn)
    assert float(noise.var()) == pytest.approx(0.25, rel=5 * math.sqrt(2 / noise.numel()))
    assert abs(float(noise.mean())) < 5 * 0.5 / math.sqrt(noise.numel())
    assert sites.ledgers[0].entries == [(1.0, 0.1, 600, count)]
    assert sites.ledgers[1].entries == []  # it has abstained, and its part of the noise was there


def net(width):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4)).double()


def batch(rank, rows):
    generator = torch.Generator().manual_seed(17 + rank)
    return torch.randn(rows, 6, generator=generator).double(), torch.randint(0, 4, (rows,), generator=generator)


def loss(model, rank, rows=5):
    inputs, targets = batch(rank, rows)
    return nn.functional.cross_entropy(model(inputs), targets)


def settings(**values):
    return DifferentialPrivacy(**{"noise_multiplier": 0.0, "max_grad_norm": 0.3, "sample_rate": 0.1} | values)


def sums_securely(width):
    """Gradients of two reductions, of plain and of secure sums, in some steps with other things besides."""
    rank = dist.get_rank()
    plain, secure = net(width), net(width)
    first = dadplug.GradientReduction(plain, "dsgd", privacy=settings(expected_batch=4 + rank))
    second = dadplug.GradientReduction(secure, "dsgd", privacy=settings(expected_batch=4 + rank, secure_sum=True))
    assert str(second.plan).count("masked") >= 4
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (plain, secure)]
    worst = 0.0
    for step in range(5):
        for reduction, optimizer in zip((first, second), optimizers):
            model = reduction.model
            if step != 3:  # gradients add up
                optimizer.zero_grad()
            if step == 2 and rank == 1:
                reduction.idle()
            elif step == 4:
                scaler.scale(loss(model, rank)).backward()
                reduction.synchronize()
                for each in model.parameters():
                    each.grad /= 1024
            else:
                with reduction.no_sync():
                    loss(model, 10 + rank, 3).backward()
                loss(model, rank, 0 if step == 1 and rank == 2 else 5).backward()
                reduction.synchronize()
        assert second.first_difference() is None
        for one, other in zip(plain.parameters(), secure.parameters(), strict=True):
            assert bool(one.grad.any())
            worst = max(worst, float((one.grad - other.grad).abs().max()))
            other.grad.copy_(one.grad)  # so that parameters stay alike
        for optimizer in optimizers:
            optimizer.step()
    unit = 0.3 / 4096
    assert 0 < worst <= 2.01 * 3 * unit / 2 / 15  # each site rounds once in a step; of two steps where gradients add up
    assert [each.steps for each in second._private.ledger.entries] == [5]
    assert second.contributors == [0, 1, 2]
    return [each.grad.clone() for each in secure.parameters()]


@pytest.mark.parametrize("width", [5, 3000])  # gathered, and summed on the way
def test_secure_sums_are_plain_sums(sites, width):
    one, *others = sites(3).run(sums_securely, width)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def has_stated_noise():
    rank = dist.get_rank()
    model = nn.Linear(40, 10).double()
    privacy = DifferentialPrivacy(2.0, 1.5, 0.1, 5, secure_sum=True)
    reduction = dadplug.GradientReduction(model, "dsgd", privacy=privacy)
    drawn = []
    for _ in range(60):
        model.zero_grad()
        reduction.idle()
        drawn.append(torch.cat([each.grad.flatten() for each in model.parameters()]) * 15 / 3.0)
    noise = torch.stack(drawn)
    assert float(noise.var()) == pytest.approx(1, rel=5 * math.sqrt(2 / noise.numel()))
    if rank == 1:  # it has no further data, and its part of the noise is in the others' steps
        reduction.join()
    else:
        more = []
        for _ in range(60):
            model.zero_grad()
            reduction.idle()
            more.append(torch.cat([each.grad.flatten() for each in model.parameters()]) * 10 / 3.0)
        reduction.join()
        noise = torch.stack(more)
        assert float(noise.var()) == pytest.approx(1, rel=5 * math.sqrt(2 / noise.numel()))
    entries = reduction._private.ledger.entries
    assert entries == [(2.0, 0.1, 60 if rank == 1 else 120, 3)]
    state = copy.deepcopy(reduction.state_dict())
    reduction.load_state_dict(state)
    assert reduction._private.ledger.entries == entries
    return reduction.epsilon(1e-5), reduction.epsilon(1e-5, insiders=1), reduction.epsilon(1e-5, insiders=3)


def test_noise_and_epsilon_of_sums(sites):
    accountants = pytest.importorskip("opacus.accountants")
    (found, inside, all_of_them), *_ = sites(3).run(has_stated_noise)
    accountant = accountants.PRVAccountant()
    accountant.history = [(2.0, 0.1, 120)]
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    accountant.history = [(2.0 * math.sqrt(2 / 3), 0.1, 120)]
    assert inside == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert all_of_them == math.inf


@support.at_sites(3)
def test_other_settings_at_another_site():
    privacy = settings(secure_sum=True, max_grad_norm=0.1 if dist.get_rank() else 0.2)
    with pytest.raises(MismatchError, match=r"option privacy is .*max_grad_norm=0.2' at site 0 .*max_grad_norm=0.1'"):
        dadplug.GradientReduction(net(5), "dsgd", privacy=privacy)


@support.at_sites(2)
def test_two_sites_are_too_few():
    with pytest.raises(ValueError, match="needs at least 3 sites, and there are 2"):
        dadplug.GradientReduction(net(5), "dsgd", privacy=SHARED)


def test_what_does_not_go_with_masks():
    create = partial(Options.create, privacy=SHARED)
    refuses(
        (
            lambda: create(mode="rankdad"),
            "goes with mode='dsgd', got mode='rankdad': low-rank factors are not added up",
        ),
        (lambda: create(mode="dsgd", wire="int8"), "does not go with wire='int8': masked numbers have 32 bits"),
        (lambda: create(mode="dsgd", hierarchy="auto"), "does not go with hierarchy='auto'"),
        (lambda: create(mode="dsgd", min_sites=2), "does not go with min_sites=2: a step needs 3 sites or more"),
        (lambda: create(mode="dsgd", min_sites=3, late="skip"), "does not go with late='skip'"),
        (lambda: DifferentialPrivacy(secure_sum=1), "secure_sum must be True or False"),
        (lambda: DifferentialPrivacy(0.05, secure_sum=True), r"secure_sum needs a noise_multiplier of at least 0\.1"),
    )
    assert DifferentialPrivacy.parse("secure_sum=True").secure_sum
