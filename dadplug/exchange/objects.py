"""Gather of objects from all processes of a group, encoded by the codec: torch's own function runs pickles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import codec

MAX_BYTES = 1 << 34  # of what is sent of tensors, whose sizes follow from the model
MAX_OBJECT_BYTES = 1 << 30  # of one process's object, such as metrics or predictions


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
    own, refusal = encode_object(item)
    device, count = _device_of(group), dist.get_world_size(group)
    size = torch.tensor([len(own)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(count)]
    wait(dist.all_gather(sizes, size, group=group, async_op=True))
    lengths = [int(each) for each in sizes]
    check_lengths(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    every = [torch.empty_like(padded) for _ in range(count)]
    wait(dist.all_gather(every, padded, group=group, async_op=True))
    contents = (part[:length].cpu().numpy().data for part, length in zip(every, lengths, strict=True))
    return decode_objects(contents, refusal)


def encode_object(item: Any) -> tuple[bytes, Exception | None]:
    """Encode this process's object.

    Args:
        item: what `dadplug.exchange.codec.encode` takes.

    Returns:
        What to send to the others, and the error if the object cannot be sent.
    """
    try:
        return codec.encode(item), None
    except (TypeError, ValueError) as error:
        return codec.encode(Refusal(str(error))), error


def check_lengths(lengths: Iterable[int]) -> None:
    """Check the sizes in bytes that processes announce, before memory is allocated by them.

    Raises:
        ValueError: if one is out of range.
    """
    for rank, length in enumerate(lengths):
        if not 0 <= length <= MAX_OBJECT_BYTES:
            raise ValueError(
                f"process {rank} announces an object of {length} bytes: there may be {MAX_OBJECT_BYTES} at most"
            )


def decode_objects(contents: Iterable[bytes | memoryview], refusal: Exception | None) -> list[Any]:
    """Decode the objects of all processes.

    Args:
        contents: what they have sent, by rank.
        refusal: the error of this process's own object, if it could not be sent.

    Raises:
        TypeError: if the object of one could not be sent.
        ValueError: if one has sent something that is no such object.
    """
    objects = [codec.decode(content) for content in contents]
    for rank, each in enumerate(objects):
        if isinstance(each, Refusal):
            raise TypeError(f"process {rank} has an object that cannot be gathered: {each.reason}") from refusal
    return objects


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device that the group's backend can send from."""
    only_gpus = str(dist.get_backend(group)) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if only_gpus else torch.device("cpu")
