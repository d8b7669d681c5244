"""The agreed model of local steps: values that are the same on all sites, and the outer optimizer that moves them.

With the mean delta d of a round, the outer momentum mu and the outer learning rate lr, as of SGD with Nesterov momentum
on the gradient -d (DiLoCo, arXiv:2311.08105, algorithm 1):

    m <- mu m + d            a <- a + lr (d + mu m)            without momentum: a <- a + lr d

With lr = 1 and mu = 0 this is the mean of the sites' parameters (local SGD).

With overlap the mean of a round arrives one round later. Meanwhile a site goes on from the agreed model plus what it
has done in the round that is in transit (CoCoD-SGD, arXiv:1906.12043). At the end of round t, x the site's parameters:

    a <- a moved by the mean of round t - 1            agreed on all sites
    d_t = x - start                                    sent; its mean arrives at the end of round t + 1
    start <- x <- a + d_t

So x - a always holds what this site has done and the others do not have yet, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def outer_step(value: Tensor, delta: Tensor, momentum: Tensor | None, lr: float, mu: float) -> None:
    """Move an agreed value by the mean delta of a round, in place.

    Args:
        value: the agreed value a.
        delta: the mean delta d, of the same shape; may be overwritten.
        momentum: the momentum m, updated; None without.
        lr: outer learning rate.
        mu: outer momentum.
    """
    if momentum is not None:
        momentum.mul_(mu).add_(delta)
        delta = delta.add_(momentum, alpha=mu)
    value.add_(delta, alpha=lr)


class AgreedModel:
    """Agreed values of the parameters that are trained, in single or double precision.

    Args:
        lr: outer learning rate.
        mu: outer momentum.

    Attributes:
        values: the agreed values by name of the parameter.
    """

    def __init__(self, lr: float, mu: float) -> None:
        self._lr, self._mu = lr, mu
        self.values: dict[str, Tensor] = {}
        self._momenta: dict[str, Tensor] = {}
        self._starts: dict[str, Tensor] = {}  # of the present round; without one: the agreed value
        self._frozen: set[str] = set()  # at the end of the last round

    @torch.no_grad()
    def follow(self, model: nn.Module) -> list[str]:
        """Take in parameters that are trained from now on, before a step changes them; return their names."""
        new = []
        for name, parameter in model.named_parameters():
            known = self.values.get(name)
            if parameter.requires_grad and (known is None or known.shape != parameter.shape):
                wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
                self.values[name] = parameter.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
                self._momenta.pop(name, None)
                self._starts.pop(name, None)
                new.append(name)
        return new

    def drop_untrained(self, model: nn.Module) -> None:
        """Forget parameters that the model no longer has, or that were frozen throughout a round."""
        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        for name in [*self.values]:
            if name not in trained or (not trained[name] and name in self._frozen):
                for kept in (self.values, self._momenta, self._starts):
                    kept.pop(name, None)
        self._frozen = {name for name in self.values if not trained[name]}

    @torch.no_grad()
    def deltas(self, model: nn.Module) -> dict[str, Tensor]:
        """Compute what this site has done since the start of the round, by name, in new memory."""
        parameters = dict(model.named_parameters())
        return {
            name: torch.empty_like(value).copy_(parameters[name]).sub_(self._starts.get(name, value))
            for name, value in self.values.items()
        }

    @torch.no_grad()
    def move(self, means: Mapping[str, Tensor]) -> None:
        """Take the outer step.

        Args:
            means: the mean deltas by name; may be overwritten.
        """
        for name, mean in means.items():
            value = self.values.get(name)
            if value is None or value.shape != mean.shape:
                continue
            momentum = None
            if self._mu:
                momentum = self._momenta.get(name)
                if momentum is None:
                    momentum = self._momenta[name] = torch.zeros_like(value)
            outer_step(value, mean.to(value), momentum, self._lr, self._mu)

    @torch.no_grad()
    def begin_round(self, model: nn.Module, in_transit: Mapping[str, Tensor] | None = None) -> None:
        """Set the model to the start of the next round.

        Args:
            model: the model.
            in_transit: the site's deltas that the agreed values do not contain yet; None where there are none.
        """
        parameters = dict(model.named_parameters())
        self._starts = {}
        for name, value in self.values.items():
            start = value
            if in_transit is not None and name in in_transit:
                start = self._starts[name] = value + in_transit[name]
            parameters[name].copy_(start)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the values, momenta and starts."""
        kept = {"values": self.values, "momenta": self._momenta, "starts": self._starts}
        state: dict[str, Any] = {kind: {name: each.clone() for name, each in own.items()} for kind, own in kept.items()}
        return state | {"frozen": sorted(self._frozen)}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Restore what `state_dict` returned, on the device of the model's parameters."""
        devices = {name: parameter.device for name, parameter in model.named_parameters()}

        def restored(kind: str) -> dict[str, Tensor]:
            return {name: each.to(devices[name], copy=True) for name, each in state[kind].items() if name in devices}

        self.values, self._momenta, self._starts = restored("values"), restored("momenta"), restored("starts")
        self._frozen = set(state["frozen"])
