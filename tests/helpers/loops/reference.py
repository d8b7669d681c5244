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

    def agree(self, sites: Sequence[Gradients], rows: Sequence[int], paths: dict[str, str]) -> Gradients:
        """Return the agreed gradients; None where no site has one.

        Args:
            sites: each site's gradients by name, in the shapes of the parameters.
            rows: each site's rows.
            paths: by name of the parameter, the path that the reduction's plan gives it.
        """
        for errors in self._errors:
            for name in errors.keys() - sites[0].keys():  # of a parameter that has been frozen
                del errors[name]
        agreed: Gradients = {}
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
        return agreed

    def _lowrank(self, found: Sequence[Tensor | None], rows: Sequence[int], name: str) -> Tensor:
        total = torch.zeros(())
        for ranks, errors in zip(self._nodes, self._errors, strict=False):
            theirs = [found[rank] for rank in ranks]
            count = sum(rows[rank] for rank in ranks)
            if all(gradient is None for gradient in theirs) or not count:
                continue
            gradient = mean(theirs, [rows[rank] for rank in ranks])
            whole = gradient.flatten(1) + (errors[name] if self.feedback else 0)
            kept = best(whole, self.options.largest_rank, self.options.tolerance)
            if self.feedback:
                errors[name] = whole - kept
            total = total + count / sum(rows) * kept.view_as(gradient)
        return total

    def _powersgd(self, found: Sequence[Tensor | None], rows: Sequence[int], name: str) -> Tensor:
        like = next(gradient for gradient in found if gradient is not None)
        matrices = self._with_errors(found, rows, name, like.flatten(1))
        if name not in self._bases:
            basis = self._method.basis(name, tuple(matrices[0].shape), like)  # type: ignore[attr-defined]
            self._first_bases[name] = self._bases[name] = basis.clone().T
        left = torch.linalg.qr(sum(matrix @ self._bases[name] for matrix in matrices)).Q
        right = sum(matrix.T @ left for matrix in matrices)
        self._keep(name, [matrix - left @ right.T / len(matrices) for matrix in matrices])
        lengths = right.norm(dim=0)  # where the sum has a lower rank, directions are drawn anew
        self._bases[name] = torch.where(lengths > 1e-12 * lengths.max(), right, self._first_bases[name])
        return (left @ right.T).view_as(like) / sum(rows)

    def _topk(self, found: Sequence[Tensor | None], rows: Sequence[int], name: str) -> Tensor:
        like = next(gradient for gradient in found if gradient is not None)
        wholes = self._with_errors(found, rows, name, like.flatten())
        agreed = torch.zeros_like(wholes[0])
        for whole in wholes:
            chosen = whole.abs().topk(math.ceil(self.options.density * whole.numel())).indices
            agreed[chosen] += whole[chosen]
            whole[chosen] = 0
        self._keep(name, wholes)
        return agreed.view_as(like) / sum(rows)

    def _with_errors(
        self, found: Sequence[Tensor | None], rows: Sequence[int], name: str, like: Tensor
    ) -> list[Tensor]:
        """Each site's sum of gradients over its rows, with what it has kept back."""
        return [
            errors[name] + (torch.zeros_like(like) if gradient is None else count * gradient.reshape(like.shape))
            for errors, gradient, count in zip(self._errors, found, rows, strict=True)
        ]

    def _keep(self, name: str, kept: Sequence[Tensor]) -> None:
        if self.feedback:
            for errors, error in zip(self._errors, kept, strict=True):
                errors[name] = error


def mean(found: Sequence[Tensor | None], rows: Sequence[int]) -> Tensor:
    """The mean over sites by rows; a site without a gradient counts as zero."""
    present = [(count, gradient) for count, gradient in zip(rows, found, strict=True) if gradient is not None]
    return sum((count / sum(rows) * gradient for count, gradient in present), torch.zeros_like(present[0][1]))


def best(matrix: Tensor, rank: int, tolerance: float) -> Tensor:
    """The best approximation of rank r, without singular values up to a share of the largest."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.where(values > tolerance * values[0], values, 0)[:rank]
    return left[:, :rank] * values @ right[:rank]
