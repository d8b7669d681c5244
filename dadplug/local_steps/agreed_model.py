"""Agreed values of the parameters, and the outer step that moves them by the mean delta of a round.

With the mean delta d of a round, the outer momentum mu and the outer learning rate lr, as of SGD with Nesterov
momentum on the gradient -d (DiLoCo, arXiv:2311.08105, algorithm 1):

    m <- mu m + d            a <- a + lr (d + mu m)            without momentum: a <- a + lr d

With lr = 1 and mu = 0 this is the mean of the sites' parameters (local SGD). That of sparse deltas is chosen in each
round unless it is fixed, see `dadplug.local_steps.delta_format.SparseFormat`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..exchange.fields import check_kinds


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


def _wide_type(parameter: Tensor) -> torch.dtype:
    """Return the type of a parameter's agreed values and momenta."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor Inf; one pass without a copy, unless its sum overflows."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


class AgreedModel:
    """Agreed values of the parameters that are trained, in single or double precision.

    Args:
        mu: outer momentum.

    Attributes:
        values: the agreed values by name of the parameter.
    """

    def __init__(self, mu: float) -> None:
        self._mu = mu
        self.values: dict[str, Tensor] = {}
        self._momenta: dict[str, Tensor] = {}
        self._starts: dict[str, Tensor] = {}  # of the present round; without one: the agreed value
        self._frozen: set[str] = set()  # at the end of the last round
        self._rooms: dict[str, Tensor] = {}  # memory of deltas, and of starts
        self._rooms_of_starts: dict[str, Tensor] = {}

    @torch.no_grad()
    def follow(self, model: nn.Module) -> list[str]:
        """Take in parameters that are trained from now on, before a step changes them; return their names."""
        new = []
        for name, parameter in model.named_parameters():
            known = self.values.get(name)
            if parameter.requires_grad and (known is None or known.shape != parameter.shape):
                own = parameter.detach().contiguous()
                self.values[name] = own.to(_wide_type(parameter), copy=True)
                self._momenta.pop(name, None)
                self._starts.pop(name, None)
                new.append(name)
        return new

    @torch.no_grad()
    def drop_untrained(self, model: nn.Module, names: Iterable[str]) -> None:
        """Forget parameters that the model no longer has, and those of some that were frozen throughout a round.

        Args:
            model: the model.
            names: names of the parameters whose round ends.
        """
        parameters, ending = dict(model.named_parameters()), {*names}
        trained = {name: each.requires_grad for name, each in parameters.items()}
        for name in [*self.values]:
            if name not in trained or (name in ending and not trained[name] and name in self._frozen):
                if name in trained and name in self._starts:  # which lacks what was in transit of other sites
                    parameters[name].copy_(self.values[name])
                for kept in (self.values, self._momenta, self._starts, self._rooms, self._rooms_of_starts):
                    kept.pop(name, None)
        frozen = {name for name in ending & self.values.keys() if not trained[name]}
        self._frozen = frozen | ((self._frozen & self.values.keys()) - ending)

    @torch.no_grad()
    def deltas(self, model: nn.Module, names: Iterable[str] | None = None, *, reuse: bool = False) -> dict[str, Tensor]:
        """Compute what this site has done since the start of the round, by name.

        Args:
            model: the model.
            names: names of the parameters; None for all.
            reuse: whether to write to the memory of the last call with it; otherwise to new memory, which costs the
                system's time to clear it.
        """
        parameters, found = dict(model.named_parameters()), {}
        for name in self.values if names is None else names:
            value = self.values[name]
            room = self._room_for(self._rooms, name, value) if reuse else torch.empty_like(value)
            found[name] = torch.sub(parameters[name].to(value.dtype), self._starts.get(name, value), out=room)
        return found

    @staticmethod
    def _room_for(rooms: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
        """Return memory of the shape and type of a tensor, the same as the last time if that fits."""
        room = rooms.get(name)
        if room is None or (room.shape, room.dtype, room.device) != (like.shape, like.dtype, like.device):
            room = rooms[name] = torch.empty_like(like)
        return room

    @torch.no_grad()
    def move(self, means: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        """Take the outer step.

        Args:
            means: the mean deltas by name; may be overwritten.
            rates: the outer learning rates by name.
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
            outer_step(value, mean.to(value), momentum, rates[name], self._mu)

    @torch.no_grad()
    def begin_round(
        self,
        model: nn.Module,
        in_transit: Mapping[str, Tensor] | None = None,
        names: Iterable[str] | None = None,
    ) -> None:
        """Set the model to the start of the next round.

        Args:
            model: the model.
            in_transit: the site's deltas that the agreed values do not contain yet; None where there are none.
            names: names of the parameters whose round begins; None for all.
        """
        parameters = dict(model.named_parameters())
        for name in self.values if names is None else names:
            start = value = self.values[name]
            self._starts.pop(name, None)
            if in_transit is not None and name in in_transit:
                room = self._room_for(self._rooms_of_starts, name, value)
                start = self._starts[name] = torch.add(value, in_transit[name], out=room)
            parameters[name].copy_(start)

    @torch.no_grad()
    def mark(self, model: nn.Module, names: Iterable[str]) -> None:
        """Let a round start from the present parameters, since all that was done before has been sent.

        Args:
            model: the model.
            names: names of the parameters.
        """
        parameters = dict(model.named_parameters())
        for name in names:
            room = self._room_for(self._rooms_of_starts, name, self.values[name])
            self._starts[name] = room.copy_(parameters[name])

    def unmark(self, names: Iterable[str]) -> None:
        """Let a round start from the agreed values again, since what was sent does not count."""
        for name in names:
            self._starts.pop(name, None)

    @torch.no_grad()
    def restart(self, model: nn.Module) -> None:
        """Set the model to the start of the round: all that was done since is dropped."""
        parameters = dict(model.named_parameters())
        for name, value in self.values.items():
            parameters[name].copy_(self._starts.get(name, value))

    @torch.no_grad()
    def move_and_keep(self, model: nn.Module, means: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        """Take the outer step in mid-round: the model goes on from the agreed values and what it has done since.

        Args:
            model: the model.
            means: the mean deltas by name; may be overwritten.
            rates: the outer learning rates by name.
        """
        parameters = dict(model.named_parameters())
        for name, mean in means.items():
            value, parameter = self.values.get(name), parameters.get(name)
            if value is None or parameter is None or value.shape != mean.shape:
                continue
            progress = self._room_for(self._rooms_of_starts, name, value)  # where the start is, if there is one
            torch.sub(parameter.detach().to(value.dtype), self._starts.pop(name, value), out=progress)
            self.move({name: mean}, rates)
            if parameter.dtype == value.dtype:
                torch.add(value, progress, out=parameter.detach())
            else:
                parameter.copy_(progress.add_(value))

    def as_of_model(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the agreed values in the types of the parameters, and all other parameters, by name."""
        named = model.named_parameters()
        return {name: self.values.get(name, each.detach()).to(each.dtype) for name, each in named}

    def donate(self, model: nn.Module) -> dict[str, Any]:
        """Return what a site needs besides `as_of_model` to go on from the agreed values."""
        types = {name: each.dtype for name, each in model.named_parameters()}
        wide = {name: value for name, value in self.values.items() if value.dtype != types[name]}
        frozen = sorted(self._frozen)
        return {"names": [*self.values], "wide": wide, "momenta": dict(self._momenta), "frozen": frozen}

    def adopt(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Take over what `donate` has returned at another site, with the parameters of `as_of_model` in the model.

        Raises:
            ValueError: if tensors are not finite ones of the right shapes and types; KeyError if there is no parameter.
        """
        own = {name: each.detach() for name, each in model.named_parameters()}
        wide = state["wide"]
        found = {name: wide[name] if name in wide else own[name].contiguous() for name in state["names"]}
        for name, each in [*found.items(), *state["momenta"].items()]:
            if not is_finite(each):
                raise ValueError(f"{name!r} has NaN or Inf")
        kept = {"values": found, "momenta": state["momenta"], "starts": {}, "frozen": state["frozen"]}
        self.load_state_dict(kept, model)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the values, momenta and starts."""
        kept = {"values": self.values, "momenta": self._momenta, "starts": self._starts}
        state: dict[str, Any] = {kind: {name: each.clone() for name, each in own.items()} for kind, own in kept.items()}
        return state | {"frozen": sorted(self._frozen)}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Restore what `state_dict` returned, on the device of the model's parameters."""
        own = dict(model.named_parameters())

        def restored(kind: str) -> dict[str, Tensor]:
            found = {name: each.to(own[name].device, copy=True) for name, each in state[kind].items() if name in own}
            for name, each in found.items():
                if (each.shape, each.dtype) != (own[name].shape, _wide_type(own[name])):
                    raise ValueError(f"{name!r} is of another shape or type")
            return found

        check_kinds(state, {"frozen": Sequence[str]})
        self.values, self._momenta, self._starts = restored("values"), restored("momenta"), restored("starts")
        self._frozen = set(state["frozen"])
