"""Random training steps at two sites, run with `GradientReduction` and by hand; see `test_step_histories`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from loops.compare import MODES, run
from loops.site import CLASSES, WIDTH, Site, sgd
from torch import Tensor, nn

ROWS = 11  # of the table
BACKWARDS = ("plain", "both", "again", "part", "outside", "other", "twice")
"""Losses of a backward pass: of a batch, of two batches, with the shared layer used twice, of the layers behind a cut,
with the weights as a term, of the layers before, and two passes through one graph."""


class Mixed(nn.Module):
    """Layers of all kinds of factors: linear ones in a chain, one used several times, a convolution, a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, 9), nn.Linear(9, 9)
        self.conv, self.table = nn.Conv1d(3, 4, 2), nn.Embedding(ROWS, 8)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 10)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, inputs: Tensor, repeat: int = 1, cut: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(repeat):
            hidden = torch.tanh(self.shared(hidden))
        hidden = hidden.detach() if cut else hidden
        seen = self.conv(hidden.view(-1, 3, 3)).flatten(1)
        numbers = (10 * inputs[:, 0]).long() % ROWS
        return self.head(torch.tanh(self.last(self.norm(seen + self.table(numbers)))))


@dataclass(frozen=True)
class Step:
    """One step of a history.

    Attributes:
        actions: by site, what it does before it agrees: a name and numbers.
        ends: by site, whether it synchronises where it has written gradients without a backward pass. A site that has
            neither is idle, and one with a backward pass synchronises.
        clears: whether all sites clear their gradients after it.
        updates: whether all sites take the optimizer's step after it.
        freezes: number of a layer that all sites freeze, or free, before it; None for none.
    """

    actions: tuple[tuple[tuple[Any, ...], ...], ...]
    ends: tuple[bool, ...]
    clears: bool = True
    updates: bool = True
    freezes: int | None = None


class History:
    """A loop that follows the steps; in a run by hand it leaves out what the reduction has refused.

    Args:
        steps: the steps.
        quiet: number of steps after these, whose losses are zero.
    """

    def __init__(self, steps: list[Step], quiet: int = 0) -> None:
        self._steps, self._quiet = steps, quiet
        self._refused: set[tuple[int, int]] = set()  # actions by step and number

    def __call__(self, site: Site) -> None:
        model = site.model(Mixed)
        reduction, optimizer = site.reduce(model, weighting="uniform"), sgd(model, 0.1)
        for number, step in enumerate(self._steps):
            if step.freezes is not None:
                layer = [*model.children()][step.freezes]
                layer.requires_grad_(not next(layer.parameters()).requires_grad)
            before = [(each.grad, None if each.grad is None else each.grad.clone()) for each in model.parameters()]
            self._written: list[Tensor] = []  # by the program, in this step
            done = {action[0] for action in step.actions[site.rank]}
            idle = not done & {"backward", "quiet"} and not (step.ends[site.rank] and "write" in done)
            for place, action in enumerate(step.actions[site.rank]):
                written = idle and action[0] in ("write", "scale")  # which does not count in an idle step
                if (number, place) not in self._refused and not written:
                    try:
                        self._act(site, model, reduction, number, action)
                    except RuntimeError as error:
                        if site.by_hand or "on its way" not in str(error):
                            raise
                        self._refused.add((number, place))
            if site.by_hand:
                own = _own(model, before, [] if idle else self._written)
                if idle:  # gradients of earlier steps do not count
                    for parameter, counts in zip(model.parameters(), own, strict=True):
                        parameter.grad = parameter.grad if counts else None
                site.agree(reduction, int(any(own)))
            elif idle:
                site.idle(reduction)
            else:
                reduction.synchronize()
                site.record(reduction, {})
            if step.updates:
                optimizer.step()
            if step.clears:
                optimizer.zero_grad()

        for number in range(self._quiet):
            optimizer.zero_grad()
            _backward(site, model, "plain", number, scale=0.0)
            site.agree(reduction, 1) if site.by_hand else reduction.synchronize()
            if not site.by_hand:
                site.record(reduction, {})

    def _act(self, site: Site, model: Any, reduction: Any, step: int, action: tuple[Any, ...]) -> None:
        name, *numbers = action
        if name in ("backward", "quiet"):
            with reduction.no_sync() if name == "quiet" else nullcontext():
                _backward(site, model, BACKWARDS[numbers[0]], 10 * step + numbers[1])
            return
        if name == "clear":
            model.zero_grad(set_to_none=bool(numbers[0]))
            return
        parameters = [each for each in model.parameters() if each.requires_grad]
        parameter = parameters[numbers[0] % len(parameters)]
        if name == "drop":
            parameter.grad = None
        elif name == "write":
            parameter.grad = torch.full_like(parameter, 0.1 + 0.1 * numbers[1])
            self._written.append(parameter.grad)
        elif parameter.grad is not None and name == "zero":
            parameter.grad.zero_()
        elif parameter.grad is not None and name == "scale":
            parameter.grad.mul_(0.5 + numbers[1])
        elif parameter.grad is not None and name == "read":
            float(parameter.grad.sum())


def _backward(site: Site, model: Any, kind: str, batch: int, scale: float = 1.0) -> None:
    inputs, targets = site.batch(batch, rows=3 + batch % 4)
    if kind == "other":
        model.shared(model.first(inputs)).square().mean().backward()
        return
    found = model(inputs, repeat=2 if kind == "again" else 1, cut=kind == "part")
    value = scale * nn.functional.cross_entropy(found, targets)
    if kind == "both":
        value = value + nn.functional.cross_entropy(model(inputs.flip(0)), targets)
    elif kind == "outside":
        value = value + model.first.weight.square().sum() + model.conv.weight.square().sum()
    value.backward(retain_graph=kind == "twice")
    if kind == "twice":
        value.backward()


def _own(model: nn.Module, before: list[tuple[Tensor | None, Tensor | None]], written: list[Tensor]) -> list[bool]:
    """Return by parameter whether it has a gradient that counts: not one of an earlier step, nor one that was cleared.

    Args:
        model: the model.
        before: the gradients before the step, and copies of them.
        written: gradients that the program has made in the step, which count if they hold zeros, too.
    """
    own = []
    for parameter, (kept, values) in zip(model.parameters(), before, strict=True):
        gradient = parameter.grad
        if gradient is None:
            own.append(False)
        elif gradient is kept and values is not None:
            own.append(bool(gradient.any()) and not torch.equal(gradient, values))
        else:
            own.append(bool(gradient.any()) or any(gradient is each for each in written))
    return own


def problems(steps: list[Step], mode: str) -> list[str]:
    """Run a history both ways; return where they differ, in words. None is taken for zeros."""
    history, wrong = History(steps), []
    found = run(history, Site(MODES[mode]))
    expected = run(history, Site(MODES[mode], [record.paths for record in found.records]))
    for step, (ours, theirs) in enumerate(zip(found.records, expected.records, strict=True)):
        for name, gradient in theirs.gradients.items():
            own = ours.gradients[name]
            if own is None or gradient is None:
                error = float("inf") if any(each is not None and each.any() for each in (own, gradient)) else 0.0
            else:
                error = float((own - gradient).norm() / (gradient.norm() + 1e-5))
            if error > 1e-9:
                ratio = float((own * gradient).sum() / gradient.square().sum()) if error < float("inf") else error
                wrong.append(f"step {step}: {name} is off by {error:.1e} (along the expected one: {ratio:.6g})")
    return [*wrong, *(f"sites differ in {name}" for name in found.differing if name is not None)][:4]


def unconserved(steps: list[Step], mode: str, quiet: int) -> dict[str, float]:
    """Return, by parameter, how far all that a lossy mode has applied is from the sum of the mean gradients.

    Args:
        steps: the history, without steps of the optimizer.
        mode: the mode.
        quiet: number of steps at the end in which what was kept is sent.
    """
    history, sums = History(steps, quiet), []
    found = run(history, Site(MODES[mode]))
    for each in (found, run(history, Site({"mode": "dsgd"}, [{}] * len(found.records)))):
        total: dict[str, Tensor] = {}
        for record in each.records:
            for name, gradient in record.gradients.items():
                total[name] = total.get(name, torch.zeros(())) + (torch.zeros(()) if gradient is None else gradient)
        sums.append(total)
    applied, true = sums
    assert found.differing == [None]
    return {name: float((applied[name] - each).norm() / (each.norm() + 1e-3)) for name, each in true.items()}
