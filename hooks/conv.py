"""Factors of `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`; see `hooks/convolution.py` for their form."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import Geometry, convolve
from .registry import LayerFamily, Recorder, register_family


@register_family(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(LayerFamily):
    """Family of convolutions with any stride, padding, padding mode, dilation and groups."""

    methods = ("forward", "_conv_forward")

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, input: Tensor) -> Tensor:
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        dims = len(module.kernel_size)
        before_and_after = module._reversed_padding_repeated_twice  # last dimension first, as F.pad wants it
        lower, upper = before_and_after[-2::-2], before_and_after[::-2]
        if module.padding_mode != "zeros":
            input = F.pad(input, before_and_after, mode=module.padding_mode)
            padding = (0,) * dims
        elif lower != upper:  # "same" with an even kernel
            input = F.pad(input, before_and_after)
            padding = (0,) * dims
        else:
            padding = tuple(lower)
        geometry = Geometry(module.stride, padding, module.dilation, False, (0,) * dims, module.groups)
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None
        return convolve(input, weight, bias, geometry, record, weight_gradients)
