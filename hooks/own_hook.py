"""Hooks of this package on parameters and optimizers, which can be distinguished from those of users."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor


class OwnHook(partial[None]):
    """Hook of this package on a tensor or an optimizer, as opposed to a hook of the user.

    Args:
        function: the function to call.
        args: positional arguments to call it with, before those of the call.
    """


def has_user_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient that are not of this package."""
    hooks: Any = parameter._backward_hooks
    if hooks and not _OWN.issuperset(map(type, hooks.values())):
        return True
    hooks = parameter._post_accumulate_grad_hooks
    return bool(hooks) and not _OWN.issuperset(map(type, hooks.values()))


_OWN = {OwnHook}
