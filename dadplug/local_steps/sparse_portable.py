"""The kernels of `sparse_kernels` in torch, for CUDA tensors and where numba cannot run, with the same bits.

A block of `block` entries is coded in `nbytes` bytes, all numbers with the lowest bit first:

    16 bits, 16 bits     the small and the large magnitude
    count bits           signs of the entries that are sent, by index
    count bits           whether an entry has the large magnitude
    count x low bits     the low bits of their indices
    the rest             a one at bit (index >> low) + i for entry number i (Elias-Fano); zeros at the end

"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS, _TURNS, _SMALLEST_RATIO = 28, 4, 2.0**-16  # as in `sparse_kernels`
_DIGITS, _BIAS = 5, 1023


def _power(exponent: Tensor) -> Tensor:
    """Return powers of two from -1022 to 1023, without a rounding that depends on the device."""
    return ((exponent + _BIAS) << 52).view(torch.float64)


def magnitude_code(values: Tensor) -> Tensor:
    """Return the codes of numbers of at least 0 in double precision: the 16 bits behind the sign, the rest cut off."""
    return values.view(torch.int64) >> (52 - _DIGITS)


def magnitude(codes: Tensor) -> Tensor:
    """Return the numbers that `magnitude_code` has coded."""
    return (codes << (52 - _DIGITS)).view(torch.float64)


def _two_magnitudes(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of the small and the large magnitude of each block's entries.

    Args:
        chosen: the sizes of the entries, in double precision, of shape (blocks, count).
    """
    top, least, count = chosen.amax(1), chosen.amin(1), chosen.shape[1]
    shift = torch.where(top > 0, _BITS - torch.frexp(top)[1].long(), 0)
    half = shift.div(2, rounding_mode="floor")
    fixed = (chosen * _power(half)[:, None] * _power(shift - half)[:, None]).long()
    total = fixed.sum(1)
    small = large = total // count
    for _ in range(_TURNS):
        upper = 2 * fixed > (small + large)[:, None]
        number, above = upper.sum(1), (fixed * upper).sum(1)
        large = torch.where(number > 0, above // number.clamp(min=1), large)
        small = torch.where(number < count, (total - above) // (count - number).clamp(min=1), small)
    first, second = _power(-half), _power(half - shift)
    large_code = magnitude_code(large.double() * first * second)
    bound = small.double() * first * second
    small_code = magnitude_code(torch.where(bound * 0.5 > least, 2.0 * least, bound))
    vanishes = magnitude(small_code) < magnitude(large_code) * _SMALLEST_RATIO
    return torch.where(vanishes, 0, small_code), large_code


def _bits_of(values: Tensor, bits: int) -> Tensor:
    """Return the bits of whole numbers along a new last dimension, the lowest first."""
    return (values[..., None] >> torch.arange(bits, device=values.device)) & 1


def _number_of(bits: Tensor) -> Tensor:
    """Return the whole numbers with these bits along the last dimension, the lowest first."""
    return (bits.long() << torch.arange(bits.shape[-1], device=bits.device)).sum(-1)


def encode(
    delta: Tensor,
    memory: Tensor,
    decay: float,
    limit: float,
    block: int,
    count: int,
    low: int,
    nbytes: int,
    out: Tensor,
) -> None:
    """Add a delta to the decayed memory, code the largest entries of each block, and keep the rest in the memory.

    Where sizes are equal the first ones are taken. No entry grows by what is subtracted, and the subtraction is exact.

    Args:
        delta: of shape (blocks * block,).
        memory: of the same shape and type, updated.
        decay: factor on the memory.
        limit: largest finite number of the type; larger sums become this number.
        block: entries of a block.
        count: entries of a block that are sent.
        low: bits of an index that are stored as they are.
        nbytes: bytes of a block's code.
        out: room for the codes, uint8, of shape (blocks * nbytes,).
    """
    whole = memory.mul_(decay).add_(delta).clamp_(-limit, limit).view(-1, block)
    sizes = whole.abs()
    threshold = sizes.topk(count, 1).values[:, -1:]
    above, equal = sizes > threshold, sizes == threshold
    chosen = above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))
    index = chosen.nonzero()[:, 1].view(-1, count)
    values = whole.gather(1, index)
    small_code, large_code = _two_magnitudes(values.abs().double())
    small, large = (magnitude(code).to(whole.dtype)[:, None] for code in (small_code, large_code))
    is_large = values.abs().double() > small.double() * 0.5 + large.double() * 0.5
    is_negative = values < 0
    sent = torch.where(is_large, large, small)
    whole.scatter_(1, index, values - torch.where(is_negative, -sent, sent))
    rest = 8 * nbytes - 32 - (2 + low) * count
    ones = torch.zeros(len(index), rest, dtype=torch.int64, device=delta.device)
    ones.scatter_(1, (index >> low) + torch.arange(count, device=delta.device), 1)
    parts = [_bits_of(torch.stack([small_code, large_code], 1), 16), is_negative, is_large, _bits_of(index, low), ones]
    bits = torch.cat([part.reshape(len(index), -1).long() for part in parts], 1)
    out.copy_(_number_of(bits.view(-1, 8)))


def decode(
    payload: Tensor,
    out: Tensor,
    share: float,
    limit: float,
    block: int,
    count: int,
    low: int,
    nbytes: int,
    signs: Tensor,
) -> int:
    """Add what blocks contain, times a share, to a sum.

    Args:
        payload: the codes, uint8, of shape (blocks * nbytes,).
        out: the sum, of shape (blocks * block,).
        share: the share.
        limit: largest finite number of the sum's type.
        block: entries of a block.
        count: entries of a block that were sent.
        low: bits of an index that are stored as they are.
        nbytes: bytes of a block's code.
        signs: two whole numbers, on any device, which grow by the entries that have the sign of the sum so far, and by
            those that have the other one; not by those where the sum is zero.

    Returns:
        The number of the first block that no `encode` can have made; -1 if there is none. Otherwise the sum is not
        complete.
    """
    bits = _bits_of(payload.view(-1, nbytes).long(), 8).view(-1, 8 * nbytes)
    codes = _number_of(bits[:, :32].view(-1, 2, 16))
    small_code, large_code = codes.unbind(1)
    negative, sizes, lows, ones = bits[:, 32:].split(
        [count, count, low * count, 8 * nbytes - 32 - (2 + low) * count], 1
    )
    wrong = (small_code > large_code) | (large_code >> _DIGITS > 2 * _BIAS) | (magnitude(large_code) > limit)
    room = count + ((block - 1) >> low)
    wrong |= (ones.sum(1) != count) | (ones[:, room:].sum(1) > 0)
    if not bool(wrong.any()):
        order = torch.arange(count, device=payload.device)
        high = ones.nonzero()[:, 1].view(-1, count) - order
        index = (high << low) | _number_of(lows.reshape(len(bits), count, low))
        wrong |= (index[:, 1:] <= index[:, :-1]).any(1) | (index >= block).any(1)
    if bool(wrong.any()):
        return int(wrong.nonzero()[0])
    small, large = ((magnitude(code).to(out.dtype).double() * share).to(out.dtype)[:, None] for code in codes.unbind(1))
    values = torch.where(sizes.bool(), large, small)
    values = torch.where(negative.bool(), -values, values)
    view = out.view(-1, block)
    before = view.gather(1, index)
    directions = before.sign() * values.sign()
    signs += torch.stack([(directions > 0).sum(), (directions < 0).sum()]).to(signs.device)
    view.scatter_(1, index, before + values)
    return -1
