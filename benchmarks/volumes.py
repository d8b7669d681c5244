"""Models of medical imaging in three dimensions, by name: those of MONAI and nnU-Net.

The libraries are imported when a model is built. `make .venv-trainers/ready` makes an environment with all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from workloads import Workload

CLASSES = 2


class _ByVoxel(nn.Module):
    """A model whose classes come last in its output, as the benchmarks' loss expects them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, volumes: Tensor) -> Tensor:
        return self.model(volumes).movedim(1, -1)


def _library(name: str, extra: str) -> Any:
    """Import a module with models, of an extra of dadplug."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"this model needs {name.partition('.')[0]} ({error}): pip install 'dadplug[{extra}]', or use the "
            "environment .venv-trainers, which `make .venv-trainers/ready` makes"
        ) from error


def _monai() -> Any:
    return _library("monai.networks.nets", "monai")


def unet() -> nn.Module:
    """MONAI's U-Net of 16 to 256 channels with residual units."""
    return _ByVoxel(_monai().UNet(3, 1, CLASSES, (16, 32, 64, 128, 256), (2, 2, 2, 2), num_res_units=2))


def dynunet() -> nn.Module:
    """MONAI's DynUNet of 16 to 128 channels."""
    strides = [2, 2, 2]
    return _ByVoxel(_monai().DynUNet(3, 1, CLASSES, [3] * 4, [1, *strides], strides, filters=[16, 32, 64, 128]))


def segresnet() -> nn.Module:
    """MONAI's SegResNet of 8 channels and more."""
    return _ByVoxel(_monai().SegResNet(3, 8, 1, CLASSES))


def densenet121() -> nn.Module:
    """MONAI's classifier of volumes."""
    return _monai().DenseNet121(3, 1, CLASSES)


def plainconv(features: tuple[int, ...] = (8, 16, 16)) -> nn.Module:
    """nnU-Net's PlainConvUNet without deep supervision; by default of few channels."""
    stages, affine = len(features), {"affine": True}
    strides = [1] + [2] * (stages - 1)
    norm = {"conv_bias": True, "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": affine, "nonlin": nn.LeakyReLU}
    networks = _library("dynamic_network_architectures.architectures.unet", "nnunet")
    model = networks.PlainConvUNet(1, stages, features, nn.Conv3d, 3, strides, 2, CLASSES, 2, **norm)
    for unused in model.decoder.seg_layers[:-1]:  # outputs of deep supervision
        unused.requires_grad_(False)
    return _ByVoxel(model)


def _volumes(size: int, by_voxel: bool = True) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        volumes = torch.randn(count, 1, size, size, size, generator=generator)
        return volumes, (volumes[:, 0] > 0).long() if by_voxel else torch.arange(count) % CLASSES

    return draw


VOLUMES = {
    "unet": Workload(unet, 2, _volumes(32)),
    "dynunet": Workload(dynunet, 2, _volumes(32)),
    "segresnet": Workload(segresnet, 2, _volumes(32)),
    "densenet121": Workload(densenet121, 2, _volumes(32, by_voxel=False)),
    "plainconv": Workload(plainconv, 2, _volumes(32)),
    "plainconv-full": Workload(lambda: plainconv((32, 64, 128, 256, 320)), 2, _volumes(32)),
}
