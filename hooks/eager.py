"""Exclusion of functions from torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager(function: _Function) -> _Function:
    """Decorate a function so that torch.compile does not trace it: the graph breaks, and the function runs eagerly.

    `torch.compiler.disable` does so, too, but imports the compiler, which takes seconds. These are the marks by which
    it is done.

    Args:
        function: the function; changed in place.

    Returns:
        The function.
    """
    frames: Any = torch._C._dynamo.eval_frame
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "a captured layer runs as it is"
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # and what it calls
    else:
        frames.skip_code(function.__code__)
    return function
