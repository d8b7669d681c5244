"""Private gradients of a model: those of the samples of each backward pass are clipped, and noise is added for a step.

Layers are captured as for the exchange of factors, so that autograd forms no gradient of a weight. At the end of each
backward pass the norms follow from the factors; then the sum of the clipped gradients is formed, once, and added to
``.grad``, which so holds nothing but sums of clipped gradients at any time: accumulation and ``zero_grad`` work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks import CapturedLayer, Factor, Form, LayerCapture, OwnHook, Recorder, capturable_layers
from ..hooks.embedding import Embedding, TableForm, _embedding
from ..hooks.linear import LINEAR
from ..logs import get_logger
from ..model_sync.samples import SampleCounter
from ..units.base import add_gradient
from ..units.lazy_gradient import unmark_agreed
from .mechanism import DifferentialPrivacy, Ledger, NoiseSource
from .normalisations import by_sample, normalisation_of
from .rows import Contribution, Formed, Rows, squared_norms

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class LookupForm(TableForm):
    """Form of a table's lookups that are not added up, so that each belongs to a sample.

    Attributes:
        padding: number of the row whose lookups have no gradient; None for none.
    """

    padding: int | None = None

    def merge(self, deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
        if self.padding is not None:
            deltas = deltas * (activations != self.padding)
        return deltas, activations


class _Lookups(Embedding):
    """Family of embeddings whose lookups are recorded one by one.

    Numbers of positions, which are the same for all samples, are looked up for each: their deltas would be summed over
    samples otherwise.

    Args:
        counter: counts the samples of the model's forward passes.
    """

    def __init__(self, counter: SampleCounter) -> None:
        self._counter = counter

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, input: Tensor) -> Tensor:
        assert isinstance(module, nn.Embedding)
        samples = self._counter.current
        if samples > 1 and input.dim() == 1 and len(input) == samples:
            if torch.equal(input, torch.arange(samples, device=input.device)):
                raise RuntimeError(
                    f"privacy cannot tell numbers of positions from one number for each of {samples} samples: give an "
                    "embedding of positions an input of the shape (1, positions)"
                )
        elif samples > 1 and (input.dim() == 1 or input.shape[0] == 1):
            input = input.expand(samples, *(input.shape if input.dim() == 1 else input.shape[1:]))
        form = LookupForm(
            width=module.embedding_dim, table_rows=module.num_embeddings, sparse=False, padding=module.padding_idx
        )
        return _embedding(module._parameters["weight"], input, None, form, record, weight_gradients)


class PrivateGradients:
    """Private gradients of a model's parameters in ``.grad``.

    Args:
        model: the model.
        privacy: the settings.
        counter: counts the samples of the model's forward passes.

    Attributes:
        privacy: the settings.
        ledger: the steps that have been made.

    Raises:
        ValueError: if a trained parameter belongs to no layer whose gradients by sample are known, or a layer mixes
            the samples of a batch; the message names it.
    """

    def __init__(self, model: nn.Module, privacy: DifferentialPrivacy, counter: SampleCounter) -> None:
        self.ledger = Ledger()
        self.privacy, self._model, self._counter = privacy, model, counter
        self._noise = NoiseSource(privacy.secure)
        self._contributions: dict[int, list[Contribution]] = defaultdict(list)  # by id of the parameter
        self._samples = 0  # of the running backward pass
        self._forward = -1  # number of the forward pass that it runs through
        self._stray: set[str] = set()  # captured parameters whose gradients autograd has formed
        self._warned = False
        _refuse_mixing(model)
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        names = {id(each): name for name, each in self._parameters.items()}
        self._capture = LayerCapture(model, _trained_layers(model), weight_gradients=False)
        self._handles: list[Any] = []
        covered = self._watch_layers(names) | self._watch_normalisations()
        if missing := [name for key, name in names.items() if key not in covered]:
            self.detach()
            raise ValueError(
                f"privacy needs the gradient of each sample, which is not known for {', '.join(missing[:5])}"
                f"{' and others' if len(missing) > 5 else ''}: freeze it, or use linear layers, convolutions, "
                "embeddings and normalisations of torch.nn, called one by one (no nn.MultiheadAttention, no recurrent "
                "layers, no parameters of your own)"
            )

    def _watch_layers(self, names: dict[int, str]) -> set[int]:
        """Capture layers with factors; return the ids of their parameters."""
        covered: set[int] = set()
        for layer in self._capture.layers.values():
            if isinstance(layer.module, nn.Embedding):
                layer.family = _Lookups(self._counter)
            layer.wrap_recorder = self._recorder
            for parameter in (layer.weight, layer.bias):
                if parameter is not None and id(parameter) not in covered:
                    covered.add(id(parameter))
                    stray = partial(self._replace, names[id(parameter)])
                    self._handles.append(parameter.register_hook(OwnHook(stray)))
        return covered

    def _watch_normalisations(self) -> set[int]:
        covered: set[int] = set()
        for module in self._model.modules():
            trained = [each for each in module._parameters.values() if each is not None and each.requires_grad]
            if trained and normalisation_of(module) is not None:
                self._handles.append(module.register_forward_hook(_Watch(self._record_normalisation)))
                for parameter in trained:
                    covered.add(id(parameter))
                    self._handles.append(parameter.register_hook(OwnHook(torch.zeros_like)))
        return covered

    def _replace(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """Keep a gradient that autograd has formed out of ``.grad``; there is none where the layer has recorded it."""
        if gradient is None:
            return None
        self._stray.add(name)
        return torch.zeros_like(gradient)

    # A backward pass

    def _recorder(self, layer: CapturedLayer, inputs: Tensor, record: Recorder) -> Recorder:
        forward, samples = self._counter.forwards, self._counter.current
        if not isinstance(layer.module, nn.Embedding):
            if inputs.dim() < 2 or (samples or len(inputs)) != len(inputs):
                raise RuntimeError(
                    f"privacy needs samples along the first dimension: the batch has {samples}, and the input of layer "
                    f"{layer.name!r} the shape {tuple(inputs.shape)}"
                )
            samples = len(inputs)

        def own(activations: Tensor, deltas: Tensor, form: Form = LINEAR) -> None:
            if not samples:
                return
            factor = Factor(activations, deltas, form).to(layer.weight.dtype)
            self._enter(forward, samples)
            self._contributions[id(layer.weight)].append(Rows.of(factor, samples))
            if layer.bias is not None:
                rows = form.bias_rows(factor.deltas)
                self._contributions[id(layer.bias)].append(Formed(rows.view(samples, -1, rows.shape[1]).sum(1)))

        return own

    def _record_normalisation(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not torch.is_grad_enabled() or not output.requires_grad:
            return
        inputs, forward = args[0].detach(), self._counter.forwards
        normalise = normalisation_of(module)
        assert normalise is not None

        def arrived(deltas: Tensor) -> None:
            if not len(deltas):
                return
            self._enter(forward, inputs.shape[0])
            normalised, first = normalise(module, inputs)
            for name, values in (("weight", deltas * normalised), ("bias", deltas)):
                parameter = module._parameters.get(name)
                if parameter is not None and parameter.requires_grad:
                    gradients = by_sample(values.detach(), parameter, first).to(parameter.dtype)
                    self._contributions[id(parameter)].append(Formed(gradients))

        output.register_hook(arrived)

    def _enter(self, forward: int, samples: int) -> None:
        """Record that the running backward pass goes through a forward pass."""
        if not self._contributions:
            self._forward, self._samples = forward, samples
        if (forward, samples) != (self._forward, self._samples):
            raise RuntimeError(
                "privacy needs a backward pass for each forward pass: one that goes through two forward passes mixes "
                "their samples. Call backward() after each; gradients add up"
            )

    def begin_backward(self) -> None:
        """Queue the clipping for the end of the running backward pass."""
        torch.autograd.Variable._execution_engine.queue_callback(self.clip)

    @torch.no_grad()
    def clip(self) -> None:
        """Add the clipped gradients of the last backward pass to ``.grad``.

        Raises:
            RuntimeError: if a gradient has come by another way than through its layer.
        """
        contributions, stray = dict(self._contributions), sorted(self._stray)
        self._contributions.clear()
        self._stray.clear()
        if stray:
            raise RuntimeError(
                f"the gradient of {stray[0]!r} has not come through a call of its layer alone, so that those of "
                "samples are not known: call the layer, and not its weight by other functions"
            )
        if not contributions:
            return
        norms = sum((squared_norms(each) for each in contributions.values()), torch.zeros(())).sqrt()
        factor = float(self._samples) if self.privacy.loss_reduction == "mean" else 1.0
        scales = factor * (self.privacy.max_grad_norm / (factor * norms)).clamp(max=1.0)
        finite = torch.isfinite(norms)
        scales = torch.where(finite, scales, 0.0)
        some = not bool(finite.all())
        if some and not self._warned:
            self._warned = True
            _log.warning("samples whose gradients hold NaN or Inf are left out, here and in further steps")
        for parameter in self._parameters.values():
            if (of_parameter := contributions.get(id(parameter))) is None:
                continue
            for each in of_parameter:
                add_gradient(parameter, _drop_spoilt(each, finite, bool(some)).clipped(scales))

    # A step

    @torch.no_grad()
    def privatise(self) -> None:
        """Add noise to the sums in ``.grad``, and divide them by the expected batch.

        The step is counted before anything is sent, whatever becomes of it.
        """
        self.clip()
        self.ledger.spend(self.privacy)
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            unmark_agreed(parameter.grad)
        self._noise.add(
            [each.grad for each in self._parameters.values() if each.grad is not None], self.privacy.deviation
        )
        for parameter in self._parameters.values():
            assert parameter.grad is not None
            parameter.grad.div_(self.privacy.expected_batch)

    def discard(self) -> None:
        """Forget what the running backward pass has recorded."""
        self._contributions.clear()
        self._stray.clear()

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._capture.detach()


class _Watch:
    """Forward hook of a layer; a copied or pickled model has one without effect in its place.

    Args:
        function: called with the layer, its inputs and its output.
    """

    def __init__(self, function: Callable[[nn.Module, Any, Any], None] = lambda module, args, output: None) -> None:
        self._function = function

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._function(module, args, output)

    def __reduce__(self) -> Any:
        return _Watch, ()


def _drop_spoilt(contribution: Contribution, finite: Tensor, some: bool) -> Contribution:
    """Return a contribution without NaN and Inf, if there are some, which a scale of 0 would not remove."""
    if not some:
        return contribution
    if isinstance(contribution, Formed):
        shape = (-1, *[1] * (contribution.gradients.dim() - 1))
        return Formed(torch.where(finite.view(shape), contribution.gradients, 0.0))
    assert isinstance(contribution, Rows)
    factor = contribution.factor
    rows = finite.repeat_interleave(factor.deltas.shape[0] // max(1, contribution.samples))[:, None]
    activations = factor.activations
    if activations.is_floating_point():
        activations = torch.where(rows, activations, 0.0)
    cleaned = replace(factor, deltas=torch.where(rows, factor.deltas, 0.0), activations=activations)
    return replace(contribution, factor=cleaned)


def _trained_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that are captured."""
    return [name for name, module in capturable_layers(model).items() if not isinstance(module, nn.EmbeddingBag)]


def _refuse_mixing(model: nn.Module) -> None:
    """Raise ValueError for layers that normalise by statistics of the batch."""
    for name, module in model.named_modules():
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if batch_norm or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats):
            raise ValueError(
                f"privacy: {name} ({type(module).__name__}) mixes the samples of a batch, whose gradients then depend "
                "on each other; use nn.GroupNorm or nn.LayerNorm"
            )
