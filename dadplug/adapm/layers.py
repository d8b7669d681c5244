"""Lookups in managed tables that replace the forward methods of nn.Embedding and nn.EmbeddingBag."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer

from ..hooks.capture import ForwardOverride
from .managed_weight import ManagedWeight


def position_of(key: int | None, keys: Tensor) -> int | None:
    """Return the position of a key among distinct keys, of shape (k,); None if it is not among them."""
    if key is None:
        return None
    places = (keys == key).nonzero()
    return int(places[0]) if places.numel() else None


class ManagedEmbedding(ForwardOverride):
    """Forward of an nn.Embedding with a managed weight.

    Args:
        module: the layer.
        weight: its weight.
    """

    def __init__(self, module: nn.Embedding, weight: ManagedWeight) -> None:
        super().__init__(module)
        self.embedding, self.weight = module, weight

    def __call__(self, input: Tensor) -> Tensor:
        keys, positions, rows = self.weight.rows_of(input)
        padding = position_of(self.embedding.padding_idx, keys)
        return F.embedding(positions, rows, padding, scale_grad_by_freq=self.embedding.scale_grad_by_freq)


class ManagedEmbeddingBag(ForwardOverride):
    """Forward of an nn.EmbeddingBag with a managed weight.

    Args:
        module: the layer.
        weight: its weight.
    """

    def __init__(self, module: nn.EmbeddingBag, weight: ManagedWeight) -> None:
        super().__init__(module)
        self.bag, self.weight = module, weight

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        keys, positions, rows = self.weight.rows_of(input)
        return F.embedding_bag(
            positions,
            rows,
            offsets,
            scale_grad_by_freq=self.bag.scale_grad_by_freq,
            mode=self.bag.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.bag.include_last_offset,
            padding_idx=position_of(self.bag.padding_idx, keys),
        )


def find_layers(model: nn.Module, optimizer: Optimizer) -> dict[str, list[tuple[str, nn.Module]]]:
    """Find the layers whose weights can be managed.

    Args:
        model: the model.
        optimizer: the optimizer; weights that it does not have are left out.

    Returns:
        By the name of the weight, the paths and layers that share it.

    Raises:
        ValueError: if such a layer has `max_norm`.
    """
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((path, module))
            names.setdefault(id(parameter), f"{path}.{name}" if path else name)
    found = {}
    for key, modules in owners.items():
        if key not in optimized or not all(
            isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for _, module in modules
        ):
            continue
        if any(type(module) not in (nn.Embedding, nn.EmbeddingBag) for _, module in modules):
            continue  # a subclass may use its weight in other ways
        if modules[0][1].weight.dtype != torch.float32:
            continue
        for path, module in modules:
            if module.max_norm is not None:
                raise ValueError(
                    f"layer {path!r} has max_norm={module.max_norm}, which rescales rows in forward: a managed row "
                    "changes by what optimizers add only. Leave it out of the optimizer's parameters, or drop max_norm"
                )
        found[names[key]] = modules
    return found
