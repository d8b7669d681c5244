"""Gradients averaged by hand: what each mode has to agree on, from the sites' gradients as plain autograd has them.

Exact modes: the mean over sites by their rows. rankdad: the mean of each site's best approximation of rank r, by SVD
(the loops' matrices are so small that the block iteration finds the optimum). PowerSGD (arXiv:1905.13727) and top-k
(arXiv:1809.07599) as published, with error feedback. Nothing here uses the library's exchange.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dadplug.options import Options
from dadplug.step.methods import make_method

Gradients = dict[str, Tensor | None]


class Agreement:
    """Gradients that the sites of one reduction have to agree on, step by step, with the error memories of all sites.

    Args:
        options: the reduction's options.
        world_size: number of sites.
        nodes: under hierarchical groups, the ranks on each node: to rankdad, a node is a site; None otherwise.
    """

    def __init__(self, options: dict[str, Any], world_size: int, nodes: list[list[int]] | None = None) -> None:
        self._nodes = nodes or [[rank] for rank in range(world_size)]
        self.options = Options.create(**options)
        self.feedback = self.options.error_feedback
        if self.feedback is None:
            self.feedback = self.options.mode in ("powersgd", "topk", "rankdad")
        self._method = make_method(self.options)
        self._errors: list[dict[str, Tensor]] = [defaultdict(lambda: torch.zeros(())) for _ in range(world_size)]
        self._bases: dict[str, Tensor] = {}
        self._first_bases: dict[str, Tensor] = {}
        self._reference = 0  # rows of the first step
        self._shares = [0.0] * world_size  # of the sites in the mean, at most, about
        self._scale = 1.0  # what makes means of sums over the reference, at most, about

    def agree(self, sites: Sequence[Gradients], rows: Sequence[int], paths: dict[str, str]) -> Gradients:
        """Return the agreed gradients; None where no site has one.

        Args:
            sites: each site's gradients by name, in the shapes of the parameters.
            rows: each site's rows.
            paths: by name of the parameter, the path that the reduction's plan gives it.
        """
        agreed: Gradients = {}
        self._reference = self._reference or sum(rows)
        for name in sites[0]:
            found = [site[name] for site in sites]
            first = next((gradient for gradient in found if gradient is not None), None)
            path = paths.get(name) if first is not None and first.dim() > 1 else None
            if first is None:
                agreed[name] = None
            elif path == "lowrank":
                agreed[name] = self._lowrank(found, rows, name)
            elif path == "powersgd":
                agreed[name] = self._powersgd(found, rows, name)
            elif path == "topk":
                agreed[name] = self._topk(found, rows, name)
            else:
                agreed[name] = mean(found, rows)
        self._shares = [max(count / sum(rows), 0.9 * share) for count, share in zip(rows, self._shares, strict=True)]
        self._scale = max(self._reference / sum(rows), 0.9 * self._scale)
        return agreed

    def _expected(self, rows: Sequence[int]) -> list[float]:
        """By site, or by node, the weight that it expects in the mean: memories are divided by it."""
        if len(self._nodes) < len(rows):
            return [self._scale] * len(self._nodes)
        return [min(1.0, max(n / self._reference, share)) for n, share in zip(rows, self._shares, strict=True)]

    def _lowrank(self, found: Sequence[Tensor | None], rows: Sequence[int], name: str) -> Tensor:
        total = torch.zeros(())
        for ranks, errors, expected in zip(self._nodes, self._errors, self._expected(rows), strict=False):
            theirs = [found[rank] for rank in ranks]
            count = sum(rows[rank] for rank in ranks)
            if all(gradient is None for gradient in theirs) or not count:
                continue
            gradient, weight = mean(theirs, [rows[rank] for rank in ranks]), count / sum(rows)
            if len(self._nodes) < len(rows):
                gradient, weight = gradient * count / self._reference, self._reference / sum(rows)
            whole = gradient.flatten(1) + (errors[name] / expected if self.feedback else 0)
            kept = best(whole, self.options.largest_rank, self.options.tolerance)
            if self.feedback:
                errors[name] = errors[name] + weight * (gradient.flatten(1) - kept)
            total = total + weight * kept.view_as(gradient)
        return total

    def _powersgd(self, found: Sequence[Tensor | None], rows: Sequence[int], name: str) -> Tensor:
        like = next(gradient for gradient in found if gradient is not None)
        matrices = self._with_errors(found, rows, name, like.flatten(1))
        if name not in self._bases:
            basis = self._method.basis(name, tuple(matrices[0].shape), like)  # type: ignore[attr-defined]
            self._first_bases[name] = self._bases[name] = basis.clone().T
        left = torch.linalg.qr(sum(matrix @ self._bases[name] for matrix in matrices)).Q
        right = sum(matrix.T @ left for matrix in matrices)
        self._keep(name, matrices, [left @ right.T / len(matrices)] * len(matrices), rows)
        lengths = right.norm(dim=0)  # where the sum has a lower rank, directions are drawn anew
        self._bases[name] = torch.where(lengths > 1e-12 * lengths.max(), right, self._first_bases[name])
        return (left @ right.T).view_as(like) / sum(rows)

    def _topk(self, found: Sequence[Tensor | None], rows: Sequence[int], name: str) -> Tensor:
        like = next(gradient for gradient in found if gradient is not None)
        wholes = self._with_errors(found, rows, name, like.flatten())
        sent = [torch.zeros_like(whole) for whole in wholes]
        for each, whole in zip(sent, wholes, strict=True):
            chosen = whole.abs().topk(math.ceil(self.options.density * whole.numel())).indices
            each[chosen] = whole[chosen]
        self._keep(name, wholes, sent, rows)
        return sum(sent).view_as(like) / sum(rows)  # type: ignore[union-attr]

    def _with_errors(
        self, found: Sequence[Tensor | None], rows: Sequence[int], name: str, like: Tensor
    ) -> list[Tensor]:
        """Each site's sum of gradients over its rows, with what it has kept of the mean, times the rows expected."""
        expected = self._reference / self._scale
        return [
            expected * errors[name]
            + (torch.zeros_like(like) if gradient is None else count * gradient.reshape(like.shape))
            for errors, gradient, count in zip(self._errors, found, rows, strict=True)
        ]

    def _keep(self, name: str, wholes: Sequence[Tensor], sent: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Keep what was not sent of the mean of this step, and what stood for more or fewer rows than expected."""
        if not self.feedback:
            return
        rest = 1 - self._reference / self._scale / sum(rows)
        for errors, whole, part in zip(self._errors, wholes, sent, strict=True):
            errors[name] = (whole - part) / sum(rows) + rest * errors[name]


def mean(found: Sequence[Tensor | None], rows: Sequence[int]) -> Tensor:
    """The mean over sites by rows; a site without a gradient counts as zero."""
    present = [(count, gradient) for count, gradient in zip(rows, found, strict=True) if gradient is not None]
    return sum((count / sum(rows) * gradient for count, gradient in present), torch.zeros_like(present[0][1]))


def best(matrix: Tensor, rank: int, tolerance: float) -> Tensor:
    """The best approximation of rank r, without singular values up to a share of the largest."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.where(values > tolerance * values[0], values, 0)[:rank]
    return left[:, :rank] * values @ right[:rank]
