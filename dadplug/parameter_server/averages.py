"""Means over sites of a model's buffers, at the end of a phase."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..errors import DamagedError, MismatchError
from ..exchange import codec
from ..exchange.sites import Sites


def pack_buffers(model: nn.Module, samples: int) -> bytes:
    """Return a model's buffers as bytes, for `average_buffers` of all sites.

    Args:
        model: the model.
        samples: samples that this site has trained on since the last mean: its weight.
    """
    return codec.encode((samples, {name: buffer.detach() for name, buffer in model.named_buffers() if buffer.numel()}))


@torch.no_grad()
def average_buffers(model: nn.Module, packed: Mapping[int, bytes | bytearray], sites: Sites) -> None:
    """Replace float buffers by their mean over sites, and counters by their maximum.

    Args:
        model: the model.
        packed: results of `pack_buffers`, by rank in ascending order.
        sites: the sites by name.

    Raises:
        MismatchError: if those of a site do not fit this model.
    """
    own = {name: buffer for name, buffer in model.named_buffers() if buffer.numel()}
    if not own:
        return
    every = []
    for rank, body in packed.items():
        try:
            samples, buffers = codec.decode(body)
            if {name: (each.shape, each.dtype) for name, each in buffers.items()} != {
                name: (each.shape, each.dtype) for name, each in own.items()
            }:
                raise ValueError("names, shapes or types differ")
            every.append((float(samples), buffers))
        except (DamagedError, ValueError, TypeError, AttributeError) as error:
            raise MismatchError(f"the buffers of {sites[rank]} do not fit this site's model: {error}") from error
    total = sum(samples for samples, _ in every)
    for name, buffer in own.items():
        values = [buffers[name].to(buffer.device) for _, buffers in every]
        if buffer.is_floating_point():
            mean = torch.zeros_like(buffer)
            for (samples, _), value in zip(every, values, strict=True):
                mean.add_(value, alpha=samples / total if total else 1 / len(every))
            buffer.copy_(mean)
        elif buffer.dtype != torch.bool:
            buffer.copy_(torch.stack(values).amax(0))
        else:
            buffer.copy_(values[0])
