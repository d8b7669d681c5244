"""Loops whose model changes: layers frozen, added, replaced, pruned, normalised, loaded, shared."""

import copy
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from .compare import loop
from .site import WIDTH, Site, Training, loss, net, sgd, trains

CHANGED = "the first gradient of a changed model may be sent as it is"


@loop()
def progressive_freezing(site: Site) -> None:
    training = Training(site)
    for step in training.steps(6):
        training.model[0].requires_grad_(step not in (2, 3))
        training.model[2].requires_grad_(step != 3)
        training.trains(step)


@loop()
def frozen_backbone(site: Site) -> None:
    model = site.model()
    model[0].requires_grad_(False)
    trains(site, model)


@loop(late=CHANGED)
def layers_added(site: Site) -> None:
    """A head appended after two steps, on all sites."""
    training = Training(site)
    for step in training.steps(5):
        if step == 2:
            torch.manual_seed(40)  # equal at both sites
            training.model.append(nn.Tanh()).append(nn.Linear(4, 4))
            training.optimizer.add_param_group({"params": training.model[-1].parameters()})
        training.trains(step)


@loop(late=CHANGED)
def module_replaced(site: Site) -> None:
    """A new head in the place of the old one, as for fine-tuning."""
    training = Training(site)
    for step in training.steps(5):
        if step == 2:
            torch.manual_seed(40)
            training.model[4] = nn.Linear(8, 4)
            training.optimizer = sgd(training.model)
        training.trains(step)


def _loads(site: Site, assign: bool) -> None:
    training = Training(site)
    kept = copy.deepcopy(training.model.state_dict())
    for step in training.steps(5):
        if step == 2:
            training.model.load_state_dict(kept, assign=assign)
            training.optimizer = sgd(training.model)
        training.trains(step)


@loop()
def state_loaded(site: Site) -> None:
    """A state loaded into the parameters in mid-run."""
    _loads(site, assign=False)


@loop(late=CHANGED)
def state_assigned(site: Site) -> None:
    """The same with assign=True: all parameters are other objects from then on."""
    _loads(site, assign=True)


@loop(chains=False, late=CHANGED)
def pruned_before(site: Site) -> None:
    """Masks from the start, removed after three steps; masked layers are in no chain."""
    model = site.model()
    prune.l1_unstructured(model[0], "weight", amount=0.4)
    prune.ln_structured(model[2], "weight", amount=2, n=2, dim=0)
    training = Training(site, model)
    for step in training.steps(5):
        if step == 3:
            for layer in (model[0], model[2]):
                prune.remove(layer, "weight")
            training.optimizer = sgd(model)
        training.trains(step)


@loop(late=CHANGED)
def pruned_in_mid_run(site: Site) -> None:
    training = Training(site)
    for step in training.steps(6):
        if step in (2, 4):
            prune.l1_unstructured(training.model[0], "weight", amount=0.3)
            training.optimizer = sgd(training.model)
        training.trains(step)


_FORMED = "the gradient of a normalised weight is formed, and approximated by one pass from the last directions"


def _normalised(norm: object) -> nn.Sequential:
    model = net()
    model.insert(2, norm(nn.Linear(9, 9)))  # type: ignore[operator]
    return model


@loop(late=_FORMED)
def spectral_norm(site: Site) -> None:
    trains(site, site.model(lambda: _normalised(parametrizations.spectral_norm)))


@loop(late=_FORMED)
def spectral_norm_by_hooks(site: Site) -> None:
    trains(site, site.model(lambda: _normalised(nn.utils.spectral_norm)))


@loop(late=_FORMED)
def weight_norm(site: Site) -> None:
    trains(site, site.model(lambda: _normalised(parametrizations.weight_norm)))


@loop(late=_FORMED)
def weight_norm_by_hooks(site: Site) -> None:
    trains(site, site.model(lambda: _normalised(nn.utils.weight_norm)))


class _Tied(nn.Module):
    """A decoder with the encoder's weights, and two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 9)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return torch.tanh(x) @ self.third.weight


@loop(chains=False)
def tied_weights(site: Site) -> None:
    trains(site, site.model(_Tied))


class _Sometimes(nn.Module):
    """A layer that is used where the first input is positive, and so at some sites."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = net(out=8), nn.Linear(8, 8)
        self.head, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        if x[0, 0] > 0:
            features = torch.tanh(self.extra(features))
        return self.head(features)


@loop()
def layer_used_at_one_site(site: Site) -> None:
    training = Training(site, site.model(_Sometimes))
    for step in training.steps(6):
        inputs, targets = site.batch(step)
        inputs[0, 0] = 1.0 if (step + site.rank) % 2 else -1.0
        loss(training.model, (inputs, targets)).backward()
        training.agree(len(inputs))


class _Hypernetwork(nn.Module):
    """A layer whose weights another one makes, through `functional_call`."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.hyper = nn.Linear(WIDTH, 4), net(out=4 * WIDTH)
        self.code = nn.Parameter(torch.linspace(0.3, 1, WIDTH)[None])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.target.weight + self.hyper(self.code).view(4, WIDTH)
        return torch.func.functional_call(self.target, {"weight": weight, "bias": self.target.bias}, (x,))


@loop(chains=False)
def hypernetwork(site: Site) -> None:
    trains(site, site.model(_Hypernetwork))


@loop(late=CHANGED)
def functional_masks(site: Site) -> None:
    """Every layer's weight masked through `functional_call`, in a model that is also called plainly."""
    training = Training(site)
    model = training.model
    masks = {name: (torch.arange(p.numel()) % 3 > 0).to(p).view(p.shape) for name, p in model.named_parameters()}
    for step in training.steps(5):
        inputs, targets = site.batch(step)
        masked = {name: p * masks[name] for name, p in model.named_parameters()}
        with training.reduction.samples(len(inputs)) if step % 2 else nullcontext():
            outputs = torch.func.functional_call(model, masked, (inputs,)) if step % 2 else model(inputs)
        nn.functional.cross_entropy(outputs, targets).backward()
        training.agree(len(inputs))
