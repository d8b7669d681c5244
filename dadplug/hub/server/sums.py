"""Sums of the hub: pieces of all sites added up as soon as all have arrived, in the order of slots.

The result does not depend on the order of arrival. Elements of 16 bits are added in 32 bits and rounded once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from ...errors import FrameError
from ..wire.messages import DTYPES, Head, Kind

_Pieces = dict[int, deque[tuple[Head, memoryview]]]  # of equal exchange and offset, by slot

LIMIT = 256 << 20  # bytes that wait for other sites' pieces, above which sites that are ahead are not read


class Sums:
    """Pieces that wait for those of other sites.

    Pieces belong together by exchange and offset, the first ones of all sites, then the second ones, and so on.

    Args:
        world_size: number of sites.
        limit: bytes that may wait.

    Attributes:
        nbytes: bytes that wait, by slot.
    """

    def __init__(self, world_size: int, limit: int = LIMIT) -> None:
        self.nbytes = [0] * world_size
        self._limit = limit
        self._waiting: dict[tuple[int, int], _Pieces] = {}  # by exchange and offset

    def extend(self, world_size: int) -> None:
        """Take the number of all sites, since there are further ones."""
        self.nbytes += [0] * (world_size - len(self.nbytes))

    def add(self, head: Head, body: memoryview, slots: Sequence[int]) -> bytes | None:
        """Take a piece.

        Args:
            head: its head.
            body: its body.
            slots: slots of the sites whose pieces count, in ascending order.

        Returns:
            The frame of the sum, if all its pieces are here.

        Raises:
            FrameError: if the piece does not fit those of other sites, or too much waits.
        """
        dtype = DTYPES.get(head.tag)
        if dtype is None:
            raise FrameError(f"summands have an unknown type of elements, number {head.tag}")
        if len(body) % dtype.itemsize or head.offset % dtype.itemsize:
            raise FrameError(f"{len(body)} bytes at byte {head.offset} are no summands of type {dtype}")
        if sum(self.nbytes) > 2 * self._limit:
            raise FrameError(f"more than {2 * self._limit} bytes of summands wait for those of other sites")
        key = head.exchange, head.offset
        pieces = self._waiting.setdefault(key, {})
        pieces.setdefault(head.slot, deque()).append((head, body))
        self.nbytes[head.slot] += len(body)
        if not all(slot in pieces for slot in slots):
            return None
        found = [pieces[slot].popleft() for slot in slots]
        for slot, (_, each) in zip(slots, found):
            self.nbytes[slot] -= len(each)
            if not pieces[slot]:
                del pieces[slot]
        if not pieces:
            del self._waiting[key]
        first = found[0][0]
        for other, each in found:
            if (other.tag, len(each)) != (first.tag, len(found[0][1])):
                raise FrameError(
                    f"its summands of exchange {head.exchange} differ in size or type from those of other sites: the "
                    "sites do not run the same program"
                )
        total = add([each for _, each in found], dtype)
        return first._replace(kind=Kind.SUM, slot=0, tag=0).pack() + total

    @property
    def full(self) -> bool:
        """Whether sites that are ahead are not to be read."""
        return sum(self.nbytes) > self._limit

    def is_ahead(self, slot: int) -> bool:
        """Return whether a site is not to be read, since too much of it waits for others."""
        return self.full and self.nbytes[slot] > min(self.nbytes)


def add(summands: Sequence[bytes | memoryview], dtype: torch.dtype) -> bytes:
    """Return a sum.

    Args:
        summands: arrays of equal sizes, at least one.
        dtype: type of their elements.
    """
    if dtype in (torch.bfloat16, torch.float16):
        total = _widen(summands[0], dtype)
        for each in summands[1:]:
            total += _widen(each, dtype)
        return torch.from_numpy(total).to(dtype).view(torch.int16).numpy().tobytes()
    kind = np.dtype(str(dtype).removeprefix("torch."))
    with np.errstate(all="ignore"):  # infinities are the sites' business
        result = np.frombuffer(summands[0], kind).copy()
        for each in summands[1:]:
            result += np.frombuffer(each, kind)
    return result.tobytes()


def _widen(content: bytes | memoryview, dtype: torch.dtype) -> np.ndarray:
    """Return elements of 16 bits as a new array of 32 bits."""
    if dtype == torch.float16:
        return np.frombuffer(content, np.float16).astype(np.float32)
    return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
