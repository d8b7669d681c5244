"""Managed embeddings: torch's own results in one process, and in any loop one process's results over several sites."""

import copy
import functools
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import support
import torch
from loops import LOOPS
from loops.site import WIDTH, Site, Training, loss, net, sgd, trains
from recommender import OPTIMIZERS, Recommender, end, steps, train
from support import refuses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dadplug import NonFiniteError
from dadplug.adapm import AdaModel, ParameterManager, RowwiseAdagrad
from dadplug.adapm.model import _rows_of_all_sites
from dadplug.errors import MismatchError

ROWS = 12


class Tabled(nn.Sequential):
    """Layers of a loop behind two tables, one of them padded, whose rows are chosen by the inputs.

    Args:
        layers: the layers, which keep their numbers.
        site: the site, where sites have rows of their own; None where they share them.
    """

    def __init__(self, layers: Iterable[nn.Module], site: int | None) -> None:
        super().__init__(*(layer.double() for layer in layers))
        self.site = site
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.tags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")

    def numbers(self, x: Tensor) -> Tensor:
        ids = (x.detach()[:, :4] * 1000).long() % ROWS
        return ids if self.site is None else ids // 2 * 2 + self.site

    def features(self, x: Tensor) -> Tensor:
        ids = self.numbers(x)
        return x.double() + 4 * (self.words(ids[:, :2]).mean(1) + self.tags(ids[:, 2:]))

    def layers(self, x: Tensor) -> Tensor:
        for layer in list(self.children())[:-2]:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.features(x))


class Managed(AdaModel):
    """What a loop calls a reduction."""

    def samples(self, count: int) -> AbstractContextManager:
        return self.reduction.samples(count)

    def no_sync(self) -> AbstractContextManager:
        return self.reduction.no_sync()

    def idle(self) -> None:
        self.reduction.idle()


class ManagedSite(Site):
    """A site whose tables are managed; without a manager they are ordinary, and gradients averaged by hand.

    Sites share rows with sgd, whose steps add up, and have their own otherwise.
    """

    def __init__(self, kind: str, mode: str, manager: ParameterManager | None) -> None:
        super().__init__({"mode": mode, "timeout": 20.0}, None if manager else [])
        self.kind, self.manager = kind, manager
        self.optimizers: list[torch.optim.Optimizer] = []

    def model(self, build: Callable[[], nn.Module] = net) -> Any:
        made = super().model(lambda: Tabled(build(), None if self.kind == "sgd" else self.rank))
        self.start = copy.deepcopy(made.state_dict())
        return made

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        made = sgd(model, lr) if self.kind == "sgd" else torch.optim.Adagrad(model.parameters(), 0.1, lr_decay=0.1)
        self.optimizers.append(made)
        return made

    def reduce(self, model: nn.Module, **options: Any) -> Any:
        if self.by_hand:
            return super().reduce(model, **options)
        managed = Managed(model, self.optimizers[0], self.manager, **{"weighting": "samples"} | self.options | options)
        for optimizer in self.optimizers:  # after what pushes the rows
            optimizer.register_step_post_hook(lambda *_: self.manager.wait_sync(everywhere=True))
        self.reductions.append(managed)
        return managed

    def record(self, reduction: Any, means: Any) -> None:
        """Record nothing: parameters are compared at the end."""

    def end(self) -> dict[str, Tensor]:
        """Return the state of the model, with whole tables."""
        state = copy.deepcopy((self._models[0] if self.by_hand else self.reductions[0]).state_dict())
        if not self.by_hand:
            self.reductions[0].close()
        return state


# Loops that differ for managed rows from those of `LOOPS`


def steps_twice(site):
    training = Training(site)
    for step in training.steps():
        training.trains(step)
        training.optimizer.step()


def fails_in_backward(site):
    training = Training(site)
    for step in training.steps():
        if step % 2:
            inputs = site.inputs(step + 50)
            rows = training.model.words(training.model.numbers(inputs))
            rows.register_hook(lambda _: 1 / 0)
            features = training.model.features(inputs)
            with pytest.raises(ZeroDivisionError):  # once gradients of the other table have arrived
                (training.model.layers(features).square().sum() + rows.square().sum() * 10).backward()
            training.optimizer.zero_grad()
        training.trains(step)


def scales_with_an_overflow(site):
    training = Training(site, check_finite=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(6):
        training.optimizer.zero_grad()
        inputs, _ = site.batch(step)
        rows = training.model.words(training.model.numbers(inputs))
        if step == 2 and site.rank:  # at one site, in rows only
            rows.register_hook(lambda gradient: gradient * torch.inf)
        scaler.scale(training.loss(step) + rows.square().mean()).backward()
        training.agree(len(inputs), scaler.get_scale())
        if step % 2:
            scaler.unscale_(training.optimizer)
        before = training.model[4].weight.detach().clone()
        scaler.step(training.optimizer)
        scaler.update()
        assert torch.equal(before, training.model[4].weight) == (step == 2)
    assert scaler.get_scale() == 64.0 * 2 / 2 * 2


def asks_for_gradients(site):
    training = Training(site)
    for step in training.steps():
        (gradient,) = torch.autograd.grad(training.loss(step + 50), training.model.words.weight)
        assert gradient.to_dense().any()
        training.trains(step)


def runs_two_optimizers(site):
    model = site.model()
    parts = nn.ModuleList([model.words, model.tags]), nn.ModuleList(list(model)[:5])
    optimizers = [site.optimizer(part, 0.3) for part in parts]
    reduction = site.reduce(model)
    for step in range(6):
        model.zero_grad()
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        for optimizer in optimizers[: 1 + step % 2]:
            optimizer.step()


def trains_the_tables_only(site):
    model = site.model()
    for layer in list(model)[:5]:
        layer.requires_grad_(False)
    trains(site, model)


def passes_closures(site):
    training = Training(site)
    for step in range(4):

        def closure(step=step):
            training.optimizer.zero_grad()
            training.trains(step)
            return 1.0

        training.optimizer.step(closure)


def changes_gradients(site):
    training = Training(site)
    for step in training.steps():
        training.trains(step)
        for parameter in training.model.parameters():
            parameter.grad.mul_(0.5)


def clips(site):
    training = Training(site)
    by_hand = partial(nn.utils.clip_grad_norm_, [*training.model.parameters()])
    for step in training.steps():
        training.trains(step)
        assert (by_hand if site.by_hand else training.reduction.clip_grad_norm_)(0.2) > 0.2


def recomputes(site):
    training = Training(site)
    for step in training.steps():
        inputs, targets = site.batch(step)
        with training.reduction.samples(len(inputs)):
            scores = training.model.layers(checkpoint(training.model.features, inputs, use_reentrant=False))
        nn.functional.cross_entropy(scores, targets).backward()
        training.agree(len(inputs))


PROGRAMS = {
    name: LOOPS[name].function
    for name in (
        "plain",
        "discarded_zero_grad",
        "discarded_set_to_zero",
        "discarded_grad_none",
        "discarded_by_the_optimizer",
        "discarded_now_and_then",
        "discarded_and_no_other",
        "accumulation_under_no_sync",
        "accumulation_without_no_sync",
        "more_and_more_backward_passes",
        "static_input_buffer",
        "skipped_on_all_sites",
        "skipped_on_one_site",
        "no_backward_at_one_site",
        "batch_of_no_rows",
        "loss_times_zero",
        "single_rows",
        "gradients_kept_over_steps",
        "idle_without_clearing",
        "evaluation_between_backward_passes",
        "retained_graph",
        "exceptions_in_forward_and_loader",
        "exception_in_backward",
        "progressive_freezing",
        "input_gradient_penalty",
        "fgsm",
        "pgd",
    )
} | {
    each.__name__: each
    for each in (
        steps_twice,
        fails_in_backward,
        scales_with_an_overflow,
        asks_for_gradients,
        runs_two_optimizers,
        trains_the_tables_only,
        passes_closures,
        changes_gradients,
        clips,
        recomputes,
    )
}


def run(name, kind, mode, manager):
    """Run a program with managed rows and by hand; return the largest difference, and how far it has trained."""
    sites = [ManagedSite(kind, mode, each) for each in (manager, None)]
    found, expected = (PROGRAMS[name](site) or site.end() for site in sites)
    start = sites[0].start
    off = {each: float((found[each].double() - expected[each].double()).abs().max()) for each in expected}
    moved = {each: float((start[each] - expected[each]).abs().max()) for each in ("words.weight", "tags.weight")}
    return off, moved


def run_all(kind, mode):
    results = {}
    for name in PROGRAMS:
        with ParameterManager(timeout=200) as manager:
            try:
                results[name] = run(name, kind, mode, manager)
            except Exception:
                results[name] = traceback.format_exc()
    return results


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
    return support.sites(2).run(run_all, kind, mode, timeout=400)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("kind", "mode"), [("sgd", "dsgd"), ("adagrad", "dad")])
def test_loops_on_managed_rows_train_as_by_hand(name, kind, mode):
    for of_site in results(kind, mode):
        assert not isinstance(of_site[name], str), of_site[name]
        off, moved = of_site[name]
        assert max(off.values()) < TOLERANCE, off
        assert min(moved.values()) > 200 * TOLERANCE, moved  # else there would be nothing to see


@support.at_sites(2)
def test_what_would_go_wrong_unseen_is_refused():
    with ParameterManager(timeout=200) as manager:
        training = Training(ManagedSite("sgd", "dsgd", manager))
        managed, optimizer, number = training.reduction, training.optimizer, training.steps()
        training.trains(next(number))
        next(number)
        before = managed.state_dict()
        training.loss(1).backward()
        clip = r"clip_grad_norm_\(\) before the gradient of 'words.weight' is synchronized"
        refuses(
            (optimizer.step, "before gradient"),
            (lambda: managed.clip_grad_norm_(1.0), clip),
            error=RuntimeError,
        )
        managed.synchronize()
        spread = r"spread over the sites.*AdaModel\.other_parameters"
        refuses(
            (lambda: nn.utils.clip_grad_norm_(managed.parameters(), 1.0), spread),
            (lambda: nn.utils.clip_grad_value_(managed.parameters(), 1.0), spread),
            error=RuntimeError,
        )
        optimizer.zero_grad()
        rows = training.model.tags(training.model.numbers(training.site.inputs(2)))
        if manager.rank == 1:
            rows.register_hook(lambda gradient: gradient * torch.nan)
        (rows.square().mean() + training.loss(2)).backward()
        with pytest.raises(NonFiniteError, match=r"NaN or Inf at site 1.*the gradient of 'tags\.weight'"):
            managed.synchronize()
        optimizer.zero_grad()
        after = managed.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in ("words.weight", "tags.weight"))
        training.trains(3)
        optimizer.step()
        manager.barrier()
        managed.close()


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
