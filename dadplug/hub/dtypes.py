"""Codes of element types in the heads of `SUMMAND` frames, the same at sites and hub."""

from __future__ import annotations

import torch

CODES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.uint8: 6,
    torch.int8: 7,
    torch.int16: 8,
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
