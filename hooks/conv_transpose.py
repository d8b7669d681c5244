"""Factors of `nn.ConvTranspose1d`, `2d` and `3d`; see `hooks/convolution.py` for their form."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .convolution import Geometry, convolve
from .registry import LayerFamily, Recorder, register_family


@register_family(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTranspose(LayerFamily):
    """Family of transposed convolutions with any stride, padding, output padding, dilation and groups."""

    methods = ("forward", "_output_padding")

    def forward(
        self,
        module: nn.Module,
        record: Recorder,
        weight_gradients: bool,
        input: Tensor,
        output_size: Sequence[int] | None = None,
    ) -> Tensor:
        assert isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
        stride, padding, dilation = module.stride, module.padding, module.dilation
        assert isinstance(padding, tuple)
        size = None if output_size is None else list(output_size)
        output_padding = module._output_padding(
            input, size, list(stride), list(padding), list(module.kernel_size), len(stride), list(dilation)
        )
        geometry = Geometry(stride, padding, dilation, True, tuple(output_padding), module.groups)
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None
        return convolve(input, weight, bias, geometry, record, weight_gradients)
