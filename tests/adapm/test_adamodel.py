"""Managed embeddings: torch's own results in one process, and in any loop one process's results over several sites."""

import contextlib
import copy
import functools
import inspect
import traceback
from types import SimpleNamespace

import pytest
import support
import torch
from recommender import OPTIMIZERS, Recommender, end, steps, train
from support import refuses
from torch import nn
from torch.utils.checkpoint import checkpoint

from dadplug import NonFiniteError
from dadplug.adapm import AdaModel, ParameterManager, RowwiseAdagrad
from dadplug.adapm.model import _rows_of_all_sites
from dadplug.errors import MismatchError

ROWS, WIDTH, SIZES, STEPS = 12, 3, (3, 5), 6


class Net(nn.Module):
    """Two tables, one of them padded, and dense layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.tags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.mix = nn.Linear(2 * WIDTH, 4).double()
        self.head = nn.Linear(4, 1).double()

    def features(self, ids):
        return torch.cat([self.words(ids[:, :2]).mean(1), self.tags(ids[:, 2:])], 1).double()

    def forward(self, ids):
        return self.head(self.mix(self.features(ids)).tanh()).squeeze(1)


class Loop:
    """One program that trains, on a site or in one process.

    Attributes:
        rank: the site; None for one process.
    """

    def __init__(self, kind, rank=None, mode="dsgd", manager=None, options=None, several=False):
        self.kind, self.rank, self.manager = kind, rank, manager
        self.net = Net()
        made = {"sgd": functools.partial(torch.optim.SGD, lr=0.3)}
        made["adagrad"] = functools.partial(torch.optim.Adagrad, lr=0.2, lr_decay=0.1)
        tables = [*self.net.words.parameters(), *self.net.tags.parameters()]
        dense = [*self.net.mix.parameters(), *self.net.head.parameters()]
        self.optimizer = made[kind](tables if several else self.net.parameters())
        self.second = made[kind](dense) if several else None
        self.model, self.managed = self.net, None
        if manager is not None:
            self.managed = AdaModel(
                self.net, self.optimizer, manager, mode=mode, **{"weighting": "samples"} | (options or {})
            )
            self.model = self.managed

    def batch(self, step, only=None):
        """Rows of a step; sites share them with sgd, whose steps add up, and have their own otherwise."""
        parts = []
        for site in (0, 1):
            if (only is None or only == site) and self.rank in (None, site):
                generator = torch.Generator().manual_seed(97 * step + site)
                ids = torch.randint(ROWS, (SIZES[site], 4), generator=generator)
                if self.kind != "sgd":
                    ids = ids // 2 * 2 + site
                parts.append((ids, torch.randn(SIZES[site], generator=generator, dtype=torch.float64)))
        return [torch.cat(part) for part in zip(*parts, strict=True)] if parts else None

    def stated(self, ids):
        """State the samples of a batch, for programs that call parts of the model."""
        return contextlib.nullcontext() if self.managed is None else self.managed.reduction.samples(len(ids))

    def loss(self, step, only=None):
        ids, targets = self.batch(step, only)
        return (self.model(ids) - targets).square().mean()

    def begin(self, step):
        """A step up to the gradients that are agreed on."""
        self.zero_grad()
        self.loss(step).backward()
        self.synchronize()

    def zero_grad(self, **options):
        for optimizer in filter(None, (self.optimizer, self.second)):
            optimizer.zero_grad(**options)

    def synchronize(self):
        if self.managed is not None:
            self.managed.synchronize()

    def no_sync(self):
        return contextlib.nullcontext() if self.managed is None else self.managed.reduction.no_sync()

    def refresh(self):
        if self.manager is not None:
            self.manager.wait_sync(everywhere=True)

    def step(self, *args):
        for optimizer in filter(None, (self.optimizer, self.second)):
            optimizer.step(*args)
        self.refresh()

    def apply(self):
        self.synchronize()
        self.step()

    def train(self, step):
        self.loss(step).backward()
        self.apply()

    def update(self, step):
        """A step as it should be."""
        self.zero_grad()
        self.train(step)

    def steps(self, numbers=range(STEPS)):
        """Clear the gradients before each step, yield its number, and agree and apply them after it."""
        for step in numbers:
            self.zero_grad()
            yield step
            self.apply()


# Training loops on managed embeddings, which run on a site or in one process, and a comparison of both


def plain(loop):
    for step in range(STEPS):
        loop.update(step)


def discards_to_none(loop):
    for step in range(STEPS):
        loop.loss(step + 50).backward()
        loop.update(step)


def discards_to_zero(loop):
    for step in range(STEPS):
        (loop.loss(step + 50) * 10).backward()
        loop.zero_grad(set_to_none=False)
        loop.train(step)


def discards_by_the_model(loop):
    for step in range(STEPS):
        (loop.loss(step + 50) * 10).backward()
        loop.model.zero_grad()
        loop.train(step)
        for parameter in loop.model.parameters():
            parameter.grad = None


def discards_at_one_site(loop):
    for step in loop.steps():
        if loop.rank == 1:
            (loop.loss(step + 50) * 10).backward()
            loop.zero_grad()
        loop.loss(step).backward()


def clears_after_forward(loop):
    for step in range(STEPS):
        loss = loop.loss(step)
        loop.zero_grad()
        loss.backward()
        loop.apply()


def skips_batches(loop):
    for step in range(STEPS + 3):
        loop.zero_grad()
        loop.loss(step).backward()
        if step % 3 == 1:
            continue
        loop.apply()


def accumulates_without_sync(loop):
    for step in loop.steps(range(0, 2 * STEPS, 2)):
        with loop.no_sync():
            (loop.loss(step) / 2).backward()
        (loop.loss(step + 1) / 2).backward()


def accumulates_over_synchronizations(loop):
    for step in range(0, 2 * STEPS, 2):
        loop.zero_grad()
        for micro in (step, step + 1):
            (loop.loss(micro) / 2).backward()
            loop.synchronize()
        loop.step()


def never_clears(loop):
    for step in range(4):
        (loop.loss(step) / 4).backward()
        loop.apply()


def steps_twice(loop):
    for step in range(STEPS):
        loop.update(step)
        loop.step()


def fails_in_forward(loop):
    for step in range(STEPS):
        if step % 2 and loop.rank != 0:
            handle = loop.net.head.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loop.loss(step + 50)
            handle.remove()
        loop.update(step)


def fails_in_backward(loop):
    for step in range(STEPS):
        if step % 2:
            ids = loop.batch(step + 50)[0]
            with loop.stated(ids):
                rows = loop.net.words(ids)
                rows.register_hook(lambda _: 1 / 0)
                features = loop.net.features(ids)
                with pytest.raises(ZeroDivisionError):  # once gradients of the other table have arrived
                    (loop.net.mix(features).square().sum() + rows.square().sum() * 10).backward()
        loop.update(step)


def fails_in_the_loader(loop):
    def load():
        for step in range(STEPS):
            if step == 2:
                raise OSError("the disk is gone")
            yield step

    with contextlib.suppress(OSError):
        for step in load():
            loop.zero_grad()
            loop.loss(step).backward()
            if step < 1:
                loop.apply()
    for step in range(STEPS):
        loop.update(step)


def scales_with_an_overflow(loop):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        loop.zero_grad()
        ids, targets = loop.batch(step)
        rows = loop.net.words(ids)
        if step == 2 and loop.rank != 0:  # at one site, in rows only
            rows.register_hook(lambda gradient: gradient * torch.inf)
        loss = (loop.model(ids) - targets).square().mean() + rows.square().mean()
        scaler.scale(loss).backward()
        loop.synchronize()
        if step % 2:
            scaler.unscale_(loop.optimizer)
        before = loop.net.head.weight.detach().clone()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.refresh()
        assert torch.equal(before, loop.net.head.weight) == (step == 2)
    assert scaler.get_scale() == 64.0 * 2 / 2 * 2


def evaluates_between(loop):
    for step in loop.steps():
        with loop.no_sync():
            loop.loss(step).backward()
        loop.model.eval()
        with torch.no_grad():
            loop.loss(step + 50)
        loop.loss(step + 51)  # with a graph that is not used
        loop.model.train()
        loop.loss(step + 20).backward()


def asks_for_gradients(loop):
    for step in loop.steps():
        (gradient,) = torch.autograd.grad(loop.loss(step + 50), loop.net.words.weight)
        assert gradient.to_dense().any()
        loop.loss(step).backward()


def runs_two_optimizers(loop):
    for step in range(STEPS):
        loop.begin(step)
        loop.optimizer.step()
        if step % 2:
            loop.second.step()
        loop.refresh()


def freezes_and_frees(loop):
    frozen = {1: [loop.net.words.weight], 2: [*loop.net.head.parameters()], 4: []}
    for step in range(STEPS):
        if step in frozen:
            for parameter in loop.net.parameters():
                parameter.requires_grad_(not any(parameter is other for other in frozen[step]))
        loop.update(step)


def trains_the_tables_only(loop):
    loop.net.mix.requires_grad_(False)
    loop.net.head.requires_grad_(False)
    discards_to_none(loop)


def passes_closures(loop):
    for step in range(STEPS):

        def closure(step=step):
            loop.zero_grad()
            loss = loop.loss(step)
            loss.backward()
            loop.synchronize()
            return loss

        loop.step(closure)


def goes_through_a_graph_twice(loop):
    for step in loop.steps():
        loss = loop.loss(step)
        with loop.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()


def changes_gradients(loop):
    for step in range(STEPS):
        loop.begin(step)
        for parameter in loop.model.parameters():
            parameter.grad.mul_(0.5)
        loop.step()


def clips(loop):
    for step in range(STEPS):
        loop.begin(step)
        if loop.managed is None:
            norm = nn.utils.clip_grad_norm_(loop.net.parameters(), 0.05)
        else:
            norm = loop.managed.clip_grad_norm_(0.05)
        assert norm > 0.05
        loop.step()


def penalizes_gradients(loop):
    for step in loop.steps():
        ids, targets = loop.batch(step)
        with loop.stated(ids):
            features = loop.net.features(ids)
            scores = loop.net.head(loop.net.mix(features).tanh()).squeeze(1)
        (slopes,) = torch.autograd.grad(scores.sum(), features, create_graph=True)
        ((scores - targets).square().mean() + slopes.square().sum(1).mean()).backward()


def recomputes(loop):
    for step in loop.steps():
        ids, targets = loop.batch(step)
        with loop.stated(ids):
            features = checkpoint(loop.net.features, ids, use_reentrant=False)
            (loop.net.head(loop.net.mix(features).tanh()).squeeze(1) - targets).square().mean().backward()


def rests_at_one_site(loop):
    for step in range(STEPS):
        loop.zero_grad()
        if loop.rank == 1 and step in (1, 2):
            loop.managed.reduction.idle()
        else:
            loop.loss(step, only=0 if step in (1, 2) else None).backward()
            loop.synchronize()
        loop.step()


LOOPS = [each for each in [*globals().values()] if inspect.isfunction(each) and each.__module__ == __name__]


def run(program, kind, mode, manager):
    """Run a program on this site and in one process; returns the largest difference, and how far it has trained."""
    several = program is runs_two_optimizers
    options = {"timeout": 20.0, "check_finite": program is not scales_with_an_overflow}
    expected = Loop(kind, several=several)
    start = copy.deepcopy(expected.net.state_dict())
    program(expected)
    loop = Loop(kind, manager.rank, mode, manager, options, several)
    program(loop)
    state = loop.managed.state_dict()
    manager.barrier()
    loop.managed.close()
    wanted = expected.net.state_dict()
    off = {name: float((state[name].double() - wanted[name].double()).abs().max()) for name in wanted}
    moved = {name: float((start[name] - wanted[name]).abs().max()) for name in wanted}
    return off, moved


def run_all(kind, mode, names):
    results = {}
    programs = {program.__name__: program for program in LOOPS}
    for name in names:
        with ParameterManager(timeout=200) as manager:
            try:
                results[name] = run(programs[name], kind, mode, manager)
            except Exception:
                results[name] = traceback.format_exc()
    return results


# Managed embeddings: torch's own results in one process, and in any loop one process's results over several sites


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_process_has_torchs_results(kind):
    model = Recommender()
    plain = copy.deepcopy(model)
    train(plain, OPTIMIZERS[kind](plain.parameters()), 6)
    optimizer = OPTIMIZERS[kind](model.parameters())
    managed = AdaModel(model, optimizer)
    assert set(managed.managed) == {"items.weight", "tags.weight"}
    train(managed, optimizer, 6, managed.synchronize)
    state = managed.state_dict()
    assert state.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_sparse_adam_has_torchs_results():
    model = nn.Embedding(20, 4, sparse=True)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SparseAdam(plain.parameters(), lr=0.1)
    own = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    managed = AdaModel(model, own)
    for step in range(5):
        ids = torch.randint(20, (7,), generator=torch.Generator().manual_seed(step))
        for each, stepped in ((plain, optimizer), (managed, own)):
            stepped.zero_grad()
            each(ids).square().sum().backward()
            stepped.step()
    torch.testing.assert_close(managed.state_dict()["weight"], plain.weight.detach(), rtol=1e-4, atol=1e-5)


def trains_together(kind):
    import dadplug

    torch.manual_seed(1)
    model = Recommender()
    plain = copy.deepcopy(model)
    torch.manual_seed(dadplug.adapm.ParameterManager().rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    managed = AdaModel(model, optimizer)
    steps(managed, optimizer, range(5))
    state = managed.state_dict()
    fresh = AdaModel(Recommender(), OPTIMIZERS[kind]([torch.nn.Parameter(torch.zeros(1))]))
    assert not fresh.managed
    managed.load_state_dict(state)
    again = managed.state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)
    train(plain, OPTIMIZERS[kind](plain.parameters()), 5)
    end(managed)
    return state, plain.state_dict()


def test_sites_together_are_one_process(sites):
    for state, expected in sites(2).run(trains_together, "sgd"):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


SHARED_ROWS = {"adagrad": torch.optim.Adagrad, "rowwise": RowwiseAdagrad, "sgd": torch.optim.SGD}
ROWS_OF_SITES = ((0, 1, 2), (1, 2, 3))  # rows 1 and 2 are used by both in each step


def part_of(site, step):
    """Return the gradient of a site in a step, in float64, with the same signs as the other's or with others."""
    part = torch.zeros(4, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(10 * step + site)
    part[list(ROWS_OF_SITES[site])] = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    return part


def stepped(kind, weight, state, gradient):
    """Take a step of torch's optimizer in float64; return the changes of the weight and of the sums."""
    parameter = nn.Parameter(weight.clone())
    optimizer = SHARED_ROWS[kind]([parameter], lr=0.1)
    if state is not None:
        optimizer.state[parameter]["sum"] = state.clone()
    parameter.grad = gradient
    optimizer.step()
    after = optimizer.state[parameter].get("sum")
    return parameter.detach() - weight, None if after is None else after - state


def steps_shared_rows(kind):
    torch.manual_seed(3)
    table = nn.Embedding(4, 3)
    whole = weight = table.weight.detach().double()
    optimizer = SHARED_ROWS[kind](table.parameters(), lr=0.1)
    managed = AdaModel(table, optimizer, reduce="sum", always_reduce=True, mode="dsgd")  # which keeps the sites in step
    manager = managed.manager
    state = sums = None if kind == "sgd" else torch.zeros(4, 1 if kind == "rowwise" else 3, dtype=torch.float64)
    for step in range(4):
        parts = [part_of(site, step) for site in range(2)]
        own = list(ROWS_OF_SITES[manager.rank])
        optimizer.zero_grad()
        (managed(torch.tensor(own)) * parts[manager.rank][own]).sum().backward()
        managed.synchronize()
        optimizer.step()
        manager.wait_sync(everywhere=True)
        changes = [stepped(kind, weight, state, part) for part in parts]
        weight = weight + sum(change for change, _ in changes)
        state = None if state is None else state + sum(change for _, change in changes)
        change, more = stepped(kind, whole, sums, sum(parts))
        whole, sums = whole + change, None if sums is None else sums + more
    found = managed.state_dict()["weight"].double()
    managed.close()
    manager.close()
    return found, weight, whole


@pytest.mark.parametrize("kind", SHARED_ROWS)
def test_steps_of_sites_on_the_same_rows_add_up(sites, kind):
    """Each site steps by its part of the gradient; alone a row has the result of one process, and with sgd always."""
    for found, expected, one_process in sites(2).run(steps_shared_rows, kind):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        off = (found - one_process).abs().amax(1)
        assert off[[0, 3]].max() < 1e-6
        assert off[[1, 2]].max() < 1e-6 if kind == "sgd" else off[[1, 2]].min() > 1e-2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids):
        return self.out(self.words(ids))


def test_a_weight_that_is_used_as_a_matrix_stays_an_ordinary_parameter():
    model = Tied()
    managed = AdaModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not managed.managed
    assert managed(torch.tensor([1, 2])).shape == (2, 9)


@pytest.mark.parametrize(
    ("layer", "make", "message"),
    [
        ({"max_norm": 1.0}, lambda p: torch.optim.SGD(p, lr=0.1), "has max_norm=1.0, which rescales rows"),
        ({}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "which momentum=0.9 does not allow"),
        ({}, lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "which weight_decay=0.1 does not allow"),
        ({}, torch.optim.Rprop, "cannot be stepped by Rprop: use SGD, Adagrad, SparseAdam, Adam or"),
    ],
)
def test_what_rows_of_a_batch_cannot_have_is_told(layer, make, message):
    model = nn.Sequential(nn.Embedding(9, 4, **layer))
    with pytest.raises(ValueError, match=message):
        AdaModel(model, make(model.parameters()))


def test_frozen_tables_and_evaluation_push_nothing():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    managed = AdaModel(model, optimizer)
    managed(torch.tensor([1, 2])).sum().backward()
    managed.synchronize()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(managed.module[0](torch.arange(9)), before)


def test_intents_name_their_weight():
    model = nn.Sequential(nn.Embedding(9, 4))
    managed = AdaModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    managed.intent({"0.weight": torch.tensor([1])}, 0)
    with pytest.raises(ValueError, match=r"no managed weight is called 'words'; there are '0\.weight'"):
        managed.intent({"words": torch.tensor([1])}, 0)


def test_closed_layers_are_as_they_were():
    model = nn.Sequential(nn.Embedding(9, 4))
    managed = AdaModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    managed.close()
    assert model(torch.tensor([1])).isnan().all()


TOLERANCE = 3e-6


@functools.cache
def results(kind, mode):
    """Run all loops in one call of the sites; the tests look at what has come of them."""
    return support.sites(2).run(run_all, kind, mode, [program.__name__ for program in LOOPS], timeout=400)


@pytest.mark.parametrize("program", LOOPS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(("kind", "mode"), [("sgd", "dsgd"), ("adagrad", "dad")])
def test_loops_on_managed_rows_train_as_one_process(program, kind, mode):
    for result in (of_site[program.__name__] for of_site in results(kind, mode)):
        assert not isinstance(result, str), result
        off, moved = result
        assert max(off.values()) < TOLERANCE, off
        tables = [moved["words.weight"], moved["tags.weight"]]
        assert min(tables) > 200 * TOLERANCE, moved  # else there would be nothing to see


@support.at_sites(2)
def test_what_would_go_wrong_unseen_is_refused():
    with ParameterManager(timeout=200) as manager:
        loop = Loop("sgd", manager.rank, manager=manager)
        loop.update(0)
        before = loop.managed.state_dict()
        loop.zero_grad()
        loop.loss(1).backward()
        refuses(
            (lambda: loop.optimizer.step(), "before gradient"),
            (
                lambda: loop.managed.clip_grad_norm_(1.0),
                r"clip_grad_norm_\(\) before the gradient of 'words.weight' is synchronized",
            ),
            error=RuntimeError,
        )
        loop.synchronize()
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with pytest.raises(RuntimeError, match=r"spread over the sites.*AdaModel\.other_parameters"):
                clip(loop.managed.parameters(), 1.0)
        loop.zero_grad()
        ids, _ = loop.batch(2)
        rows = loop.net.tags(ids)
        if manager.rank == 1:
            rows.register_hook(lambda gradient: gradient * torch.nan)
        (rows.square().mean() + loop.loss(2)).backward()
        with pytest.raises(NonFiniteError, match=r"NaN or Inf at site 1.*the gradient of 'tags\.weight'"):
            loop.synchronize()
        loop.zero_grad()
        after = loop.managed.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in ("words.weight", "tags.weight"))
        loop.update(3)
        manager.barrier()
        loop.managed.close()


@pytest.mark.parametrize("count", [101, 1 << 40, -1])
def test_a_site_cannot_state_more_rows_than_a_table_has(count):
    """Before room is made for them."""

    class States:
        sites = ("site 0 (a)", "site 1 (b)")

        def gather_present(self, lengths):
            return {0: lengths, 1: (count,)}

        def leave_out(self, rank, error):
            raise error

    keys, rows = torch.tensor([3, 5, 3]), torch.ones(3, 2)
    weight = SimpleNamespace(rows=100, rows_of_gradient=lambda: (keys, rows))
    manager = SimpleNamespace(transport=States(), rank=0)
    with pytest.raises(MismatchError, match=r"site 1 \(b\) has sent an invalid list of counts"):
        _rows_of_all_sites(manager, [weight])
