"""Gather of objects from all processes of a group, encoded by the codec: torch's own function runs pickles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import codec

MAX_BYTES = 1 << 34  # of one process's object


@codec.register
class Refusal(NamedTuple):
    """Placeholder of an object that cannot be sent.

    Attributes:
        reason: the reason.
    """

    reason: str


def gather_objects(
    item: Any, group: dist.ProcessGroup | None = None, wait: Callable[[dist.Work], object] = dist.Work.wait
) -> list[Any]:
    """Gather an object from every process; all processes of the group must call it together.

    Args:
        item: what `dadplug.exchange.codec.encode` takes.
        group: the process group; the default one where None.
        wait: waits for a piece of work.

    Returns:
        The objects, by rank.

    Raises:
        TypeError: in all processes, if the object of one cannot be sent.
        ValueError: if another process has sent something that is no such object.
    """
    refusal: Exception | None = None
    try:
        own = codec.encode(item)
    except (TypeError, ValueError) as error:
        refusal, own = error, codec.encode(Refusal(str(error)))
    device, count = _device_of(group), dist.get_world_size(group)
    size = torch.tensor([len(own)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(count)]
    wait(dist.all_gather(sizes, size, group=group, async_op=True))
    lengths = [int(each) for each in sizes]
    for rank, length in enumerate(lengths):
        if not 0 <= length <= MAX_BYTES:
            raise ValueError(f"process {rank} announces an object of {length} bytes: there may be {MAX_BYTES} at most")
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    every = [torch.empty_like(padded) for _ in range(count)]
    wait(dist.all_gather(every, padded, group=group, async_op=True))
    contents = (part[:length].cpu().numpy().data for part, length in zip(every, lengths, strict=True))
    objects = [codec.decode(content) for content in contents]
    for rank, each in enumerate(objects):
        if isinstance(each, Refusal):
            raise TypeError(f"process {rank} has an object that cannot be gathered: {each.reason}") from refusal
    return objects


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device that the group's backend can send from."""
    only_gpus = str(dist.get_backend(group)) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if only_gpus else torch.device("cpu")
