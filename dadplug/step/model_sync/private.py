"""Private tensors of a model, which stay at their site, and the part of the model that the sites share.

All that sends, compares or replaces tensors of a model iterates over the shared part in its place, so that there is one
place where private tensors are left out.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

_PRIVATE = "_dadplug_private"  # attribute of a parameter
_EXAMPLES = 4  # names in a message


class SharedPart(nn.Module):
    """View of a model without its private tensors, and without the modules that have a private tensor of their own.

    Names are matched whenever it is iterated over, so that tensors that are replaced or added stay private, too.

    Args:
        whole: the model.
        patterns: patterns of the private names, as `fnmatch.fnmatchcase` takes them.

    Attributes:
        whole: the model.

    Raises:
        ValueError: if a pattern matches nothing, nothing that is trained is shared, or a tensor has a private name and
            one that is not.
    """

    whole: nn.Module

    def __init__(self, whole: nn.Module, patterns: Sequence[str]) -> None:
        super().__init__()
        object.__setattr__(self, "whole", whole)  # none of its modules
        self._patterns, self._matched = patterns, dict[str, bool]()
        names = [name for name, _ in self._tensors()]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"private: no parameter or buffer matches {pattern!r}; names are those of model.named_parameters() "
                    f"and named_buffers(), such as {', '.join(map(repr, names[:_EXAMPLES]))}"
                )
        self.follow()
        if not any(each.requires_grad for each in self.parameters()):
            raise ValueError(
                f"private={patterns!r} leaves no trained parameter for the sites to share: name fewer, or train alone"
            )

    def is_private(self, name: str) -> bool:
        """Return whether the tensor of a name is private."""
        if name not in self._matched:
            self._matched[name] = any(fnmatchcase(name, pattern) for pattern in self._patterns)
        return self._matched[name]

    def follow(self) -> None:
        """Follow changes of the model: mark its private parameters, for `is_private`.

        Raises:
            ValueError: if a tensor has a private name and one that is not.
        """
        names = defaultdict[int, list[str]](list)
        for name, tensor in self._tensors():
            names[id(tensor)].append(name)
        for every in names.values():
            private, shared = ([name for name in every if self.is_private(name) is own] for own in (True, False))
            if private and shared:
                raise ValueError(
                    f"private: {private[0]!r} and {shared[0]!r} are one tensor, which cannot be both private and "
                    "shared: match both names, or none"
                )
        _mark(self.whole, self.is_private)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the model, each by all of its names."""
        yield from self.whole.named_parameters(remove_duplicate=False)
        yield from self.whole.named_buffers(remove_duplicate=False)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.whole.named_parameters(*args, **kwargs)
        return ((name, each) for name, each in named if not self.is_private(name))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return ((name, each) for name, each in self.whole.named_buffers(*args, **kwargs) if not self.is_private(name))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.whole.named_modules(*args, **kwargs):
            own = (*module._parameters, *module._buffers)
            if not any(self.is_private(f"{name}.{each}".lstrip(".")) for each in own):
                yield name, module

    def get_submodule(self, target: str) -> nn.Module:
        return self.whole.get_submodule(target)


def shared_part(model: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """Return the part of a model that sites share: the model itself where nothing is private.

    Args:
        model: the model.
        patterns: patterns of the private names.

    Raises:
        ValueError: as `SharedPart`.
    """
    if patterns:
        return SharedPart(model, patterns)
    _mark(model, lambda name: False)
    return model


def whole_of(part: nn.Module) -> nn.Module:
    """Return the model that `shared_part` has returned a part of."""
    return part.whole if isinstance(part, SharedPart) else part


def private_parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the private parameters of the model that `shared_part` has returned a part of."""
    if not isinstance(part, SharedPart):
        return {}
    return {name: each for name, each in part.whole.named_parameters() if part.is_private(name)}


def _mark(model: nn.Module, is_private: Any) -> None:
    for name, parameter in model.named_parameters():
        if is_private(name):
            setattr(parameter, _PRIVATE, True)
        elif hasattr(parameter, _PRIVATE):
            delattr(parameter, _PRIVATE)


def is_private(parameter: Any) -> bool:
    """Return whether a parameter is private."""
    return hasattr(parameter, _PRIVATE)


class LocalGradients:
    """Gradients of the private parameters: all sites leave out a step in which those of one hold NaN or Inf.

    They are `dadplug.step.reducer.reducer.AttachedGradients` that have no weight, and make no step by themselves.

    Args:
        part: the shared part of the model.
    """

    names = ("a private layer",)  # sites may have other ones
    arrived = cleared = False

    def __init__(self, part: nn.Module) -> None:
        self._part = part

    def first_not_finite(self) -> int | None:
        """Return 0 if a gradient holds NaN or Inf, else None."""
        gradients = [each.grad for each in private_parameters(self._part).values() if each.grad is not None]
        dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        return None if all(bool(each.isfinite().all()) for each in dense) else 0

    def apply_share(self, share: float) -> None:
        """Leave the gradients as autograd has made them."""

    def fill_with_inf(self) -> None:
        """Replace the gradients by Inf, so that a GradScaler leaves out the step at this site, too."""
        for each in private_parameters(self._part).values():
            if each.requires_grad:
                each.grad = torch.full_like(each, math.inf)


# State of optimizers

_LEFT_OUT = "dadplug_left_out"  # name in a state, with the names of what was left out


def _private_entries(holder: Any, state: dict[str, Any]) -> set[int]:
    """Return the numbers of private parameters in the state of an optimizer; none of other objects."""
    if not hasattr(holder, "param_groups"):
        return set()
    groups = zip(holder.param_groups, state["param_groups"], strict=True)
    numbered = (pair for group, packed in groups for pair in zip(packed["params"], group["params"], strict=True))
    return {number for number, parameter in numbered if is_private(parameter)}


def further_entries(holder: Any) -> set[str]:
    """Return the names of what an optimizer of private parameters has in its state besides entries and groups."""
    state = holder.state_dict() if hasattr(holder, "param_groups") else {}
    return state.keys() - {"state", "param_groups"} if _private_entries(holder, state) else set()


def _of_site(entries: dict[Any, Any], private: Container[int]) -> dict[Any, Any]:
    """Return the entries of an optimizer's state that stay at this site: of private parameters, or of none."""
    return {key: each for key, each in entries.items() if key in private or not isinstance(key, int)}


def is_of_site(group: dict[str, Any]) -> bool:
    """Return whether a parameter group of an optimizer has private parameters alone, and settings of its site."""
    return bool(group["params"]) and all(map(is_private, group["params"]))


def shared_state(holder: Any) -> dict[str, Any]:
    """Return the state of an object.

    Of an optimizer of private parameters it has the entries of the others alone, and no settings of groups that have
    only private ones. What belongs to no parameter may be of private ones, too: of that it has the names, and
    `load_joined_state` refuses it.
    """
    state = {**holder.state_dict()}
    if private := _private_entries(holder, state):
        own = _of_site(state["state"], private)
        state["state"] = {number: each for number, each in state["state"].items() if number not in own}
        if names := sorted(str(key) for key in own if not isinstance(key, int)):
            state[_LEFT_OUT] = names
        groups = zip(holder.param_groups, state["param_groups"], strict=True)
        state["param_groups"] = [{"params": each["params"]} if is_of_site(own) else each for own, each in groups]
    return state


def load_shared_state(holder: Any, state: dict[str, Any]) -> None:
    """Restore what `shared_state` returned; an optimizer keeps its own state of private parameters.

    Args:
        holder: the object.
        state: the state.
    """
    own = holder.state_dict() if hasattr(holder, "param_groups") else {}
    state = {name: each for name, each in state.items() if name != _LEFT_OUT} if own else state
    if private := _private_entries(holder, own):
        kept = _of_site(own["state"], private)
        groups = [{**each, **other} for each, other in zip(own["param_groups"], state["param_groups"], strict=True)]
        state = {**state, "state": {**state["state"], **kept}, "param_groups": groups}
    holder.load_state_dict(state)


def load_joined_state(holder: Any, state: dict[str, Any]) -> None:
    """Restore what `shared_state` returned at another site.

    Args:
        holder: the object.
        state: the state.

    Raises:
        ValueError: if something was left out that belongs to no parameter, without which the replicas would differ.
    """
    if hasattr(holder, "param_groups") and state.get(_LEFT_OUT):
        names = ", ".join(map(repr, state[_LEFT_OUT]))
        raise ValueError(
            f"the state of {type(holder).__name__} has {names}, which belongs to no parameter, and "
            "may be of private layers: let the optimizer have shared parameters alone"
        )
    load_shared_state(holder, state)


# Private layers beside checkpoints that another site may have written


def _private_tensors(part: nn.Module) -> dict[str, Tensor]:
    if not isinstance(part, SharedPart):
        return {}
    buffers = {name: each for name, each in part.whole.named_buffers() if part.is_private(name)}
    return {**private_parameters(part), **buffers}


def private_state(part: nn.Module, optimizers: Iterable[Any]) -> dict[str, Any]:
    """Return a copy of what stays at this site: private tensors by name, and by optimizer entries and settings.

    Args:
        part: the shared part of the model.
        optimizers: the optimizers, in the same order as in `load_private_state`.
    """
    entries, groups = [], []
    for holder in optimizers:
        state = holder.state_dict()
        private = _private_entries(holder, state)
        entries.append(_of_site(state["state"], private) if private else {})
        pairs = enumerate(zip(holder.param_groups, state["param_groups"], strict=True)) if private else ()
        groups.append({number: packed for number, (own, packed) in pairs if is_of_site(own)})
    tensors = {name: each.detach() for name, each in _private_tensors(part).items()}
    return copy.deepcopy({"tensors": tensors, "optimizers": entries, "groups": groups})


@torch.no_grad()
def load_private_state(part: nn.Module, optimizers: Iterable[Any], state: dict[str, Any]) -> None:
    """Restore what `private_state` returned; what has become private since stays as it is.

    Args:
        part: the shared part of the model.
        optimizers: the first of the optimizers, or all.
        state: the state.
    """
    for name, tensor in _private_tensors(part).items():
        if name in state["tensors"]:
            tensor.copy_(state["tensors"][name])
    for holder, entries, settings in zip(optimizers, state["optimizers"], state["groups"], strict=False):
        whole = holder.state_dict()
        own = _of_site(whole["state"], private) if (private := _private_entries(holder, whole)) else {}
        kept = {number: each for number, each in whole["state"].items() if number not in own}
        groups = [settings.get(number, group) for number, group in enumerate(whole["param_groups"])]
        holder.load_state_dict({**whole, "state": {**kept, **entries}, "param_groups": groups})


@contextmanager
def keeping_private(
    part: nn.Module, optimizers: Sequence[Any], read: Callable[[], dict[str, Any] | None]
) -> Iterator[None]:
    """Load a checkpoint inside a ``with`` block; private layers become those of this site's own file.

    Args:
        part: the shared part of the model.
        optimizers: as in `load_private_state`.
        read: returns the content of that file; None where there is none, and private layers stay as they are.
    """
    kept = private_state(part, optimizers)
    yield
    own = read()
    load_private_state(part, optimizers, kept if own is None else own)


def private_path(checkpoint: Any, rank: int) -> str:
    """Return the path of the file with the private layers of a site, beside a checkpoint."""
    return f"{checkpoint}.private-{rank}"
