"""What cannot be trained with differential privacy, each with its reason and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..errors import PrivacyError
from ..hooks import capturable_layers, family_of, refusal_of
from ..hooks.affine import has_sample_gradients

if TYPE_CHECKING:
    from ..options import Options

_MIXING_LOSSES = ("pytorch_metric_learning.", "lightly.loss.")
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_MODES = {
    "dad": "sends activations and deltas of single samples",
    "edad": "sends activations of single samples",
    "topk": "chooses what it sends by the data, at each site",
    "auto": "chooses what it sends by the rows of batches",
    "powersgd": "loses several points of accuracy when its sketches are noised; rankdad compresses noised gradients",
}


def check_options(options: Options) -> None:
    """Raise ValueError if options would show more than noised sums.

    Args:
        options: the options, with a setting of privacy.
    """
    privacy = options.privacy
    assert privacy is not None
    if options.mode not in ("dsgd", "rankdad"):
        reason = _MODES.get(options.mode, "is not known to send noised sums only")
        raise ValueError(f"privacy needs mode='dsgd' or 'rankdad': mode={options.mode!r} {reason}")
    if privacy.expected_batch is None:
        raise ValueError("privacy needs expected_batch, the number of samples that a batch is expected to have")
    if options.weighting != "samples":
        raise ValueError("privacy weights sites by their expected batches: leave weighting='uniform' out")
    if options.sync_batchnorm:
        raise ValueError("sync_batchnorm=True sends statistics of the data without noise: replace it by nn.GroupNorm")
    if not options.share_inputs:
        raise ValueError(
            "share_inputs=False is of modes that send inputs; with privacy no inputs are sent: leave it out"
        )


def check_model(model: nn.Module) -> None:
    """Raise PrivacyError if a model has layers that mix samples, or parameters whose gradients cannot be clipped.

    Args:
        model: the model.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS) and _uses_batch(module):
            raise PrivacyError(
                f"layer {name!r} is a {type(module).__name__}, which mixes the samples of a batch, and keeps their "
                "statistics: replace it by nn.GroupNorm"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise PrivacyError(f"layer {name!r} keeps statistics of the data: use track_running_stats=False")
        kind = f"{type(module).__module__}."
        if kind.startswith(_MIXING_LOSSES):
            raise PrivacyError(
                f"{name!r} is a {type(module).__name__}, a loss that compares the samples of a batch: no sample has a "
                "gradient of its own. Use a loss that is a mean or sum over samples"
            )
    if missing := _uncovered(model):
        described = ", ".join(f"{name} ({reason})" for name, reason in missing.items())
        raise PrivacyError(
            f"gradients by sample are not known for {described}: freeze these parameters (requires_grad_(False)), or "
            "use layers such as Linear, Conv, Embedding, LayerNorm and GroupNorm in their place"
        )


def _uses_batch(module: nn.Module) -> bool:
    """Return whether a layer that can be frozen normalises by the batch, now or after ``train()``."""
    trained = any(each.requires_grad for each in module.parameters(recurse=False))
    return trained or module.training


def _uncovered(model: nn.Module) -> dict[str, str]:
    """Return the trained parameters that no hook covers, each with the kind of its layer."""
    covered: set[int] = set()
    for layer in capturable_layers(model).values():
        family = family_of(layer)
        assert family is not None
        covered |= {id(getattr(layer, name, None)) for name in (family.weight, family.bias) if name}
    for module in model.modules():
        if has_sample_gradients(module):
            covered |= {id(module._parameters.get(name)) for name in ("weight", "bias")}
    owners = {
        id(parameter): refusal_of(module) or f"of {type(module).__name__}"
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    }
    return {
        name: owners[id(parameter)]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in covered
    }
