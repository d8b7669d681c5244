"""Hooks of ours on parameters, to be told from those of users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class OwnHook:
    """A hook on a tensor that stands for none of the user's.

    Args:
        function: what the hook calls.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    def __call__(self, argument: Any) -> None:
        self._function(argument)


def has_user_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient that are not ours."""
    before: Any = parameter._backward_hooks
    after: Any = parameter._post_accumulate_grad_hooks
    return any(hooks and not all(type(hook) is OwnHook for hook in hooks.values()) for hooks in (before, after))
