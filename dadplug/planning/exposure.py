"""Exposure of a layer's data by its messages: one word a parameter, by a rule that needs no attack.

With n the rows of a layer's input in a step, and k the rows that are sent for it:

| what is sent | class |
| --- | --- |
| anything, made by a differentially private mechanism | private |
| rows as they are, of a layer that is fed by data, or of a table | raw inputs |
| rows as they are, of any other layer | recoverable |
| low-rank factors with k >= n, whose span holds each row | recoverable |
| a gradient of a matrix, whole or by selected elements, with n up to its smaller side: the same span | recoverable |
| all else: fewer mixtures than rows, sums over more rows than the matrix has dimensions, vectors | aggregated |

Where n is not known it is taken to be the samples of a step, which is the least that it can be, and 1 before the first
step. The attacks of `dadplug.audit` measure what the classes mean for a model and its data.
"""

from __future__ import annotations

from ..methods.base import GradientPath

RAW, RECOVERABLE, AGGREGATED, PRIVATE = "raw inputs", "recoverable", "aggregated", "private"


def exposure(
    path: str, shape: tuple[int, ...], *, fed_by_data: bool, rows: int, sent: int | None, private: bool
) -> str:
    """Return the class of a parameter's messages.

    Args:
        path: the path of its gradient.
        shape: shape of the parameter.
        fed_by_data: whether its layer's input is data, or row numbers.
        rows: rows of the layer's input in a step, or samples where these are not known.
        sent: rows that are sent; None where a gradient is.
        private: whether gradients are made by a differentially private mechanism.

    Returns:
        One of the four classes; empty for a parameter that is not trained.
    """
    if path == GradientPath.FROZEN:
        return ""
    if private:
        return PRIVATE
    if path in (GradientPath.FACTORS, GradientPath.ACTIVATIONS):
        return RAW if fed_by_data else RECOVERABLE
    if sent is not None:
        return RECOVERABLE if sent >= rows else AGGREGATED
    if len(shape) < 2:
        return AGGREGATED
    width = 1
    for size in shape[1:]:
        width *= size
    return RECOVERABLE if rows <= min(shape[0], width) else AGGREGATED
