"""The trace of one call of a layer: the layer that used its output, and the function between the two."""

from __future__ import annotations

from dataclasses import dataclass

from .elementwise import IDENTITY, Elementwise


@dataclass(frozen=True)
class Trace:
    """The use of the output of one call of a layer.

    Attributes:
        key: number of the call, counted over all layers in the order of the backward pass.
        follower: name of the only layer that used the output as its input; empty if there is none.
        function: elementwise function between the two layers.
        follower_key: number of the follower's call; -1 if there is none.
        chain_break: reason why a layer behind the output cannot continue the chain; empty if there is none.
    """

    key: int
    follower: str = ""
    function: Elementwise = IDENTITY
    follower_key: int = -1
    chain_break: str = ""
