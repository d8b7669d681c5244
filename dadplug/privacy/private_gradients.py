"""Private gradients of a model: those of the samples of each backward pass are clipped, and noise is added for a step.

Layers are captured as for the exchange of factors, so that autograd forms no gradient of a weight. At the end of each
backward pass the norms follow from the factors; then the sum of the clipped gradients is formed, once, and held until
the step is made private.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import PrivacyError
from ..hooks import (
    LINEAR,
    CapturedLayer,
    Factor,
    Form,
    ForwardOverride,
    LayerCapture,
    OwnHook,
    Recorder,
    capturable_layers,
    refusal_of,
)
from ..hooks.embedding import Embedding, EmbeddingBag, TableForm, _embedding
from ..hooks.factor import Write
from ..step.methods.base import GradientPath
from ..step.model_sync.samples import SampleCounter
from ..step.units.base import Placeholders, accumulated
from ..support.logs import get_logger
from .layers import AffineBySample, Arrived, OneByOne, normalisation_of, places_of
from .losses import OutputRows, check_loss
from .mechanism import LEAST_SITES, DifferentialPrivacy, Ledger
from .rows import Formed, SampleContribution, SampleRows, squared_norms
from .secure_sum import SecureSum

if TYPE_CHECKING:
    from .noise import Sum

_log = get_logger(__name__)
_SYNCHRONIZED = "_dadplug_private"  # attribute of a gradient that is that of an earlier step


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
        elif samples > 1 and input.shape[0] != samples:
            raise PrivacyError(
                f"privacy needs samples along the first dimension: the batch has {samples}, and the input of an "
                f"embedding the shape {tuple(input.shape)}"
            )
        form = LookupForm(
            width=module.embedding_dim, table_rows=module.num_embeddings, sparse=False, padding=module.padding_idx
        )
        return _embedding(module._parameters["weight"], input, None, form, record, weight_gradients)


class _Bags(EmbeddingBag):
    """Family of bags of embeddings, of every mode, whose lookups are recorded one by one.

    Each bag is filled up to the length of the longest one by lookups that count for nothing, so that samples have
    equally many.

    Args:
        counter: counts the samples of the model's forward passes.
    """

    def __init__(self, counter: SampleCounter) -> None:
        self._counter = counter

    def forward(
        self,
        module: nn.Module,
        record: Recorder,
        weight_gradients: bool,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(module, nn.EmbeddingBag)
        numbers, bounds, scales = self.bags(module, input, offsets, per_sample_weights)
        starts, sizes = bounds[:-1], bounds.diff()
        samples = self._counter.current
        if samples and len(sizes) % samples:
            raise PrivacyError(f"privacy needs as many bags for each sample: there are {len(sizes)} for {samples}")
        longest = int(sizes.max()) if len(sizes) else 0
        places = starts[:, None] + torch.arange(longest, device=numbers.device)
        real = places < bounds[1:, None]
        places = places.clamp(max=max(0, len(numbers) - 1))
        looked_up = numbers[places] if len(numbers) else places
        if module.padding_idx is not None:
            real = real & (looked_up != module.padding_idx)
        looked_up = torch.where(real, looked_up, 0)
        form = LookupForm(width=module.embedding_dim, table_rows=module.num_embeddings, sparse=False)
        rows = _embedding(module._parameters["weight"], looked_up, None, form, record, weight_gradients)
        if scales is not None:
            rows = rows * scales[places][..., None].to(rows.dtype)
        if module.mode == "max":
            return _largest(rows, real)
        total = torch.where(real[..., None], rows, 0.0).sum(1)
        return total / real.sum(1, keepdim=True).clamp(min=1) if module.mode == "mean" else total


def _largest(rows: Tensor, real: Tensor) -> Tensor:
    """Return the largest elements of each bag; 0 for empty bags, as torch does."""
    if not rows.shape[1]:
        return rows.sum(1)
    found = torch.where(real[..., None], rows, -torch.inf).max(1).values
    return torch.where(real.any(1)[:, None], found, 0.0)


class _Origin(NamedTuple):
    """Place of a call of a layer.

    Attributes:
        forward: number of the outermost forward pass.
        part: the module that this pass has called: the model, or a direct child of it.
        within: number of the backward pass that it runs in, as in a checkpoint that computes anew; else -1.
    """

    forward: int
    part: nn.Module
    within: int


class PrivateGradients:
    """Private gradients of a model's parameters.

    Until a step is made private, its sums are held here, and ``.grad`` has placeholders. Clearing these discards the
    sums. Reading or changing them is an error, since neither would be private.

    Args:
        model: the model.
        privacy: the settings.
        counter: counts the samples of the model's forward passes.
        loss_scale: returns the loss scale of the running backward pass.
        begin: called at the beginning of each backward pass that reaches a layer.
        arrived: called at the end of such a backward pass.

    Attributes:
        privacy: the settings.
        ledger: the steps that have been made.
        secure_sum: adds up the sites' sums under masks, and adds the noise; None where `privatise` does.
        may_wait: returns the names of parameters whose gradients need not be formed before they are compressed.
        reduction: marks placeholders, see `dadplug.step.units.base.Placeholders`.

    Raises:
        ValueError: if a trained parameter belongs to no layer whose gradients by sample are known, or a layer mixes
            the samples of a batch; the message names it.
    """

    reduction = -2

    def __init__(
        self,
        model: nn.Module,
        privacy: DifferentialPrivacy,
        counter: SampleCounter,
        loss_scale: Callable[[], float],
        begin: Callable[[], None],
        arrived: Callable[[], None],
    ) -> None:
        self.ledger = Ledger()
        self.privacy, self._model, self._counter = privacy, model, counter
        self._loss_scale, self._begin, self._arrived = loss_scale, begin, arrived
        self.secure_sum: SecureSum | None = None
        self._contributions: dict[int, list[SampleContribution]] = defaultdict(list)  # by id of the parameter
        self._sums: dict[str, Tensor] = {}  # of this step, without loss scale
        self._waiting: dict[str, Sum] = {}  # those of one backward pass, which are formed later
        self.may_wait: Callable[[], Container[str]] = tuple
        self._samples = 0  # of the running backward pass
        self._root = -1  # number of this pass; those within it, as of reentrant checkpoints, belong to it
        self._parents: dict[int, int] = {}
        self._scale = 1.0
        self._forwards: dict[int, nn.Module] = {}  # that it runs through
        self._used: set[int] = set()  # numbers of forward passes that this step has run backward through
        self._warned = False
        self._loss_is_known = False  # as one whose deltas do not mix samples
        counter.on_outputs.append(self._watch_outputs)
        self._attach()

    # Hooks

    def _attach(self) -> None:
        """Capture the layers of the model."""
        self._frozen_norms = _refuse_mixing(self._model)
        self._handles: list[Any] = []
        self._overrides: list[ForwardOverride] = []
        self._modules: list[nn.Module] = []  # until all are known to be private: a failure is found again
        self._parameters = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        self._placeholders = Placeholders(self._parameters, self)
        self._buffers = [(name, each) for name, each in self._model.named_buffers() if each.is_floating_point()]
        self._versions = [each._version for _, each in self._buffers]
        layers = [
            name for name, each in capturable_layers(self._model).items() if not isinstance(each, nn.EmbeddingBag)
        ]
        self._capture = LayerCapture(self._model, layers, weight_gradients=False)
        for name, module in self._model.named_modules():
            if _is_trained_bag(module):
                self._capture.layers[name] = CapturedLayer(name, module, _Bags(self._counter), weight_gradients=False)
        covered = self._watch_layers() | self._watch_modules()
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_hook(OwnHook(partial(self._replace, name))))
        if missing := [name for name, each in self._parameters.items() if id(each) not in covered]:
            self.detach()
            owner, _, _ = missing[0].rpartition(".")
            reason = refusal_of(self._model.get_submodule(owner))
            why = f" ({reason})" if reason else ""
            raise ValueError(
                f"privacy needs the gradient of each sample, which is not known for {', '.join(missing[:5])}"
                f"{' and others' if len(missing) > 5 else ''}{why}: freeze it, or use layers of "
                "torch.nn (linear, convolutions, embeddings, normalisations, attention, recurrent), and no parameters "
                "of your own"
            )
        self._modules = [*self._model.modules()]

    def _watch_layers(self) -> set[int]:
        """Capture layers with factors; return the ids of their parameters."""
        covered: set[int] = set()
        for layer in self._capture.layers.values():
            if isinstance(layer.module, nn.Embedding):
                layer.family = _Lookups(self._counter)
            layer.wrap_recorder = self._recorder
            covered |= {id(layer.weight), id(layer.bias)}
        return covered

    def _watch_modules(self) -> set[int]:
        """Watch normalisations; run layers without factors on each sample alone, unless they share a weight."""
        covered: set[int] = set()
        with_factors = {id(layer.weight) for layer in self._capture.layers.values()}
        for name, module in self._model.named_modules():
            trained = {id(each) for each in module.parameters() if each.requires_grad}
            recorder = partial(self._formed_recorder, name, module)
            if normalisation_of(module) is not None:
                self._overrides.append(AffineBySample(module, recorder))
                covered |= {id(each) for each in module.parameters(recurse=False)}  # not those of parametrizations
            if trained and places_of(module) is not None and not trained & with_factors:
                self._overrides.append(OneByOne(module, recorder))
                covered |= trained
        return covered

    def _replace(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """Refuse a gradient that autograd has formed; there is none where the layer has recorded it."""
        if gradient is None:
            return None
        self.discard()
        raise PrivacyError(
            f"the gradient of {name!r} has not come through a call of its layer alone, so that those of samples are "
            "not known: call the layer, and not its weight by other functions"
        )

    # A forward and a backward pass

    def before_forward(self) -> None:
        """Prepare for an outermost forward pass: follow changes of the model, and release what a failed pass has left.

        Raises:
            PrivacyError: if parameters or layers have changed within a step, or a batch normalisation is in training.
        """
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes anew
            return
        self.discard()
        modules = [*self._model.modules()]
        trained = [each for each in self._model.parameters() if each.requires_grad]
        if not (_are(trained, [*self._parameters.values()]) and _are(modules, self._modules)):
            if self._sums or self._waiting:
                raise PrivacyError("the model was changed within a step: call synchronize() before")
            self._release_hooks()
            self._modules = []
            self._attach()
        if name := next((name for name, each in self._frozen_norms if each.training), None):
            raise PrivacyError(
                f"{name} mixes the samples of a batch in training: call eval() on it after model.train()"
            )
        self._versions = [each._version for _, each in self._buffers]

    def _watch_outputs(self, outputs: Sequence[Tensor], samples: int, inputs: Any) -> None:
        """Refuse a loss that is seen to mix samples: now if the model has computed it, else when its deltas arrive."""
        for output in outputs:
            if output.numel() == 1 and output.dim() < 2:
                check_loss(output, samples)
            elif not self._loss_is_known and OutputRows.fits(output, samples):
                output.register_hook(partial(self._check_deltas, OutputRows(output, samples)))

    def _check_deltas(self, rows: OutputRows, deltas: Tensor) -> None:
        if not self._loss_is_known:
            self._loss_is_known = rows.check(deltas, self._loss_scale())

    def _origin(self) -> _Origin:
        within = torch._C._current_graph_task_id()
        if within != -1:
            self._open(self._root_of(within))
        return _Origin(self._counter.forwards, self._counter.called, within)

    def _root_of(self, backward_pass: int) -> int:
        while backward_pass in self._parents:
            backward_pass = self._parents[backward_pass]
        return backward_pass

    def _open(self, root: int) -> None:
        """Begin a backward pass that has no other around it, and queue the clipping for its end."""
        if root != self._root:
            self.discard()
            self._begin()
            self._root, self._scale = root, self._loss_scale()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, root))

    def _enter(self, origin: _Origin, samples: int) -> None:
        """Record that the running backward pass goes through a call of a layer."""
        now = torch._C._current_graph_task_id()
        if origin.within not in (-1, now):
            self._parents[now] = origin.within
        self._open(self._root_of(now))
        if origin.within == -1 and origin.forward not in self._forwards:
            self._enter_forward(origin)
        if not samples:  # the step takes place all the same
            return
        if not self._contributions:
            self._samples = samples
        if samples != self._samples:
            raise PrivacyError(
                f"privacy needs the rows of a sample in the same place in all layers: one backward pass has batches of "
                f"{self._samples} and of {samples}"
            )

    def _enter_forward(self, origin: _Origin) -> None:
        if origin.forward in self._used:
            raise PrivacyError(
                "privacy needs one backward pass for each forward pass: by two, a sample counts twice. Add up the "
                "losses, and call backward() once"
            )
        parts = list(self._forwards.values())
        if parts and (self._model in (origin.part, *parts) or origin.part in parts):
            raise PrivacyError(
                "privacy needs a backward pass for each forward pass: one that goes through two forward passes mixes "
                "their samples. Call backward() after each; gradients add up"
            )
        self._forwards[origin.forward] = origin.part

    def _recorder(self, layer: CapturedLayer, inputs: Tensor, record: Recorder) -> Recorder:
        samples, origin = self._counter.current, self._origin()
        if not isinstance(layer.family, (_Lookups, _Bags)):
            samples = self._checked(layer.name, inputs, 2)
        elif not self._counter.known and inputs.dim() > 1:
            samples = len(inputs)
        elif not self._counter.known and len(inputs):
            raise PrivacyError(
                f"privacy: the number of samples of layer {layer.name!r} is not known; state it by `with "
                "reduction.samples(n):` around the forward pass"
            )

        def own(activations: Tensor, deltas: Tensor, form: Form = LINEAR) -> None:
            self._enter(origin, samples)
            if not samples:
                return
            factor = Factor(activations, deltas, form).to(layer.weight.dtype)
            self._contributions[id(layer.weight)].append(SampleRows.of(factor, samples))
            if layer.bias is not None:
                rows = form.bias_rows(factor.deltas)
                self._contributions[id(layer.bias)].append(Formed(rows.view(samples, -1, rows.shape[1]).sum(1)))

        return own

    def _checked(self, name: str, inputs: Tensor, least: int, dimension: int = 0) -> int:
        """Return the samples of a layer's input, which are those of the batch where these are known."""
        samples = self._counter.current
        found = inputs.shape[dimension] if inputs.dim() >= max(least, dimension + 1) else -1
        if found < 0 or (samples or found) != found:
            raise PrivacyError(
                f"privacy needs samples along the {'second' if dimension else 'first'} dimension: the batch has "
                f"{samples}, and the input of layer {name!r} the shape {tuple(inputs.shape)}"
            )
        return found

    def _formed_recorder(self, name: str, module: nn.Module, inputs: Tensor, dimension: int = 0) -> Arrived:
        origin, samples = self._origin(), self._checked(name, inputs, 1, dimension)

        def arrived(gradients: dict[str, Tensor]) -> None:
            self._enter(origin, samples)
            if not samples:
                return
            for key, each in gradients.items():
                parameter = module.get_parameter(key)
                self._contributions[id(parameter)].append(Formed(each.to(parameter.dtype)))

        return arrived

    @torch.no_grad()
    def _end_backward(self, root: int) -> None:
        """Clip what a backward pass has recorded, and add it to the sums of the step."""
        if root != self._root:
            return
        contributions, forwards = dict(self._contributions), set(self._forwards)
        self.discard()
        if contributions and not forwards:
            raise PrivacyError(
                "all layers are within checkpoints that run a backward pass of their own: use use_reentrant=False"
            )
        self._check_buffers()
        self._clip(contributions)
        self._used |= forwards
        self._placeholders.put()
        self._arrived()

    def _check_buffers(self) -> None:
        for (name, buffer), version in zip(self._buffers, self._versions, strict=True):
            if buffer._version != version:
                raise PrivacyError(
                    f"buffer {name!r} was changed in training, so that it may show data, and is averaged over sites: "
                    "no noise protects it"
                )

    def _clip(self, contributions: dict[int, list[SampleContribution]]) -> None:
        """Clip samples, and add up what they contribute, which is released."""
        if not contributions:
            return
        norms = sum((squared_norms(each) for each in contributions.values()), torch.zeros(())).sqrt()
        factor = (self._samples if self.privacy.loss_reduction == "mean" else 1) / self._scale
        scales = factor * (self.privacy.max_grad_norm / (factor * norms)).clamp(max=1.0)
        finite = torch.isfinite(norms)
        scales = torch.where(finite, scales, 0.0)
        some = not bool(finite.all())
        if some and not self._warned:
            self._warned = True
            _log.warning("samples whose gradients hold NaN or Inf are left out, here and in further steps")
        may_wait = self.may_wait()
        for name, parameter in self._parameters.items():
            found = [_drop_spoilt(each, finite, some) for each in contributions.pop(id(parameter), ())]
            first = name not in self._sums and name not in self._waiting
            waiting = found[0].unformed(scales) if first and len(found) == 1 and name in may_wait else None
            if waiting is not None:
                self._waiting[name] = waiting
                continue
            for each in found:
                self._form_waiting(name, parameter)
                self._sums[name] = accumulated(self._sums.get(name), each.clipped(scales), parameter)

    def _form_waiting(self, name: str, parameter: nn.Parameter) -> None:
        """Form the sum of a parameter, if it waits."""
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            made = parameter.new_empty(parameter.shape[0], parameter.numel() // parameter.shape[0])
            waiting.write(slice(None), made)
            self._sums[name] = made.view(parameter.shape)

    # A step

    @property
    def holds_gradients(self) -> bool:
        """Whether backward passes of this step have arrived, and have not been cleared."""
        return bool(self._used)

    def drop_cleared(self) -> bool:
        """Discard the sums if the program has cleared their placeholders since; return whether it has.

        Raises:
            PrivacyError: if it has put something else in their place.
        """
        gone = self._placeholders.gone()
        for name in gone:
            gradient = self._parameters[name].grad
            if gradient is not None and bool(gradient.any()):
                raise PrivacyError(
                    f"the gradient of {name!r} was changed between backward() and synchronize(), where it is not "
                    "private yet. Clip and unscale after synchronize()"
                )
        self._placeholders.drop(gone, None)
        for name in gone:
            self._sums.pop(name, None)
            self._waiting.pop(name, None)
        if gone and not self._placeholders.active:
            self._forget_step()
            return True
        return False

    @torch.no_grad()
    def privatise(self, loss_scale: float) -> dict[str, Write]:
        """Add noise to the sums, divide them by the expected batch, and write them to ``.grad``.

        Gradients whose names `may_wait` returns are not formed yet, where ``.grad`` is empty.

        The step is counted before anything is sent, whatever becomes of it.

        Args:
            loss_scale: what gradients are multiplied by, for a scaler to divide them.

        Returns:
            What writes rows of the gradients that are not formed, by name.

        Raises:
            PrivacyError: if ``.grad`` holds something else.
        """
        self._placeholders.resolve()
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is not None and not hasattr(gradient, _SYNCHRONIZED) and bool(gradient.any()):
                raise PrivacyError(
                    f".grad of {name!r} holds a gradient that is not of this step, and may not be private: call "
                    "zero_grad() before backward()"
                )
        if self.secure_sum is not None:
            self._hand_over([self._summed(name, each) for name, each in self._parameters.items()], self.secure_sum)
            return {}
        self.ledger.spend(self.privacy)
        from .noise import Noise, UnformedGradient  # numba loads when first used

        noise = Noise(self.privacy.deviation, self.privacy.secure, loss_scale / self.privacy.expected_batch)
        may_wait, sums = self.may_wait(), {}
        unformed: dict[str, Write] = {}
        for name, parameter in self._parameters.items():
            if name in may_wait and parameter.grad is None:
                unformed[name] = UnformedGradient(self._total(name, parameter), noise, parameter.shape[0]).write
            else:
                sums[name] = self._summed(name, parameter)
        noise.add([*sums.values()])
        for name, gradient in sums.items():
            parameter = self._parameters[name]
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        self._forget_step()
        return unformed

    def _forget_step(self) -> None:
        """Forget the sums of this step, and which layers were used in it."""
        self._sums.clear()
        self._waiting.clear()
        self._used.clear()

    def _summed(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the sum of a parameter in this step, and forget it."""
        self._form_waiting(name, parameter)
        own = self._sums.pop(name, None)
        return torch.zeros_like(parameter) if own is None else own.contiguous()

    def _total(self, name: str, parameter: nn.Parameter) -> Sum | None:
        """Return the sum of a parameter in this step, which need not be formed, and forget it."""
        from .noise import FormedSum

        if name in self._waiting:
            return self._waiting.pop(name)
        own = self._sums.pop(name, None)
        return None if own is None else FormedSum(own.reshape(parameter.shape[0], -1))

    def _hand_over(self, sums: Sequence[Tensor], secure_sum: SecureSum) -> None:
        """Leave noise and counting to the secure sum, which adds to ``.grad`` what it has summed."""
        secure_sum.begin_step(dict(zip(self._parameters.values(), sums, strict=True)))
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._forget_step()

    def abstain(self) -> None:
        """Have no part in a step, but for the noise that other sites count on."""
        if self.secure_sum is not None:
            zeros = {each: torch.zeros_like(each) for each in self._parameters.values()}
            self.secure_sum.begin_step(zeros, abstains=True)

    def sum_securely(self, rank: int, world_size: int) -> None:
        """Add up gradients under masks from now on.

        Args:
            rank: rank of this site.
            world_size: number of sites.

        Raises:
            ValueError: if there are too few sites.
        """
        if world_size < LEAST_SITES:
            raise ValueError(
                f"secure_sum needs at least {LEAST_SITES} sites, and there are {world_size}: from a sum of two, each "
                "could tell the other's part. Use privacy without secure_sum"
            )
        self.secure_sum = SecureSum(self.privacy, self.ledger, rank)

    def handled(self) -> dict[str, Any]:
        """Return what the handlers of this room are given, by path."""
        from . import masked  # noqa: F401  (registers its handler)

        return {} if self.secure_sum is None else {GradientPath.MASKED: self.secure_sum}

    def end_step(self) -> None:
        """Mark the gradients that are synchronized, which all sites have."""
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                setattr(parameter.grad, _SYNCHRONIZED, True)

    def discard(self) -> None:
        """Forget what the running backward pass has recorded."""
        self._contributions.clear()
        self._forwards.clear()
        self._parents.clear()
        self._root = -1

    def forget(self) -> None:
        """Forget the sums of this step."""
        self.discard()
        self._placeholders.resolve()
        self._forget_step()

    def _release_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        for override in self._overrides:
            override.restore()
        self._handles.clear()
        self._overrides.clear()
        self._capture.detach()

    def detach(self) -> None:
        """Remove the hooks from the model; sums of a step that was not synchronized are dropped."""
        self.forget()
        self._release_hooks()

    # Placeholders

    def read_gradient(self, name: str) -> Tensor:
        """Refuse to show a gradient that is not private yet."""
        raise PrivacyError(f"the gradient of {name!r} is not private yet: read it after synchronize()")

    def own_gradient(self, name: str) -> Tensor:
        """Refuse to let a gradient be changed that is not private yet."""
        raise PrivacyError(
            f"the gradient of {name!r} was changed between backward() and synchronize(), where it is not private yet. "
            "Clip and unscale after synchronize()"
        )

    def may_change(self) -> bool:
        """Return that gradients may not be changed."""
        return False


def _drop_spoilt(contribution: SampleContribution, finite: Tensor, some: bool) -> SampleContribution:
    """Return a contribution without NaN and Inf, if there are some, which a scale of 0 would not remove."""
    if not some:
        return contribution
    if isinstance(contribution, Formed):
        shape = (-1, *[1] * (contribution.gradients.dim() - 1))
        return Formed(torch.where(finite.view(shape), contribution.gradients, 0.0))
    assert isinstance(contribution, SampleRows)
    factor = contribution.factor
    rows = finite.repeat_interleave(factor.deltas.shape[0] // max(1, contribution.samples))[:, None]
    activations = factor.activations
    if activations.is_floating_point():
        activations = torch.where(rows, activations, 0.0)
    cleaned = replace(factor, deltas=torch.where(rows, factor.deltas, 0.0), activations=activations)
    return replace(contribution, factor=cleaned)


def _are(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _is_trained_bag(module: nn.Module) -> bool:
    """Return whether a module is a bag of embeddings whose lookups can be told apart."""
    if not isinstance(module, nn.EmbeddingBag) or type(module).forward is not nn.EmbeddingBag.forward:
        return False
    weight = module._parameters.get("weight")
    mixes = module.scale_grad_by_freq or module.max_norm is not None
    return weight is not None and weight.requires_grad and weight.is_floating_point() and not mixes


def _refuse_mixing(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Raise ValueError for layers that normalise by statistics of the batch; return those that are frozen by eval()."""
    frozen = []
    for name, module in model.named_modules():
        kept = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if not kept and not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        described = f"{name} ({type(module).__name__})"
        trained = any(each.requires_grad for each in module.parameters(recurse=False))
        if module.training or trained or not module.track_running_stats:
            raise ValueError(
                f"privacy: {described} mixes the samples of a batch, whose gradients then depend "
                "on each other; use nn.GroupNorm or nn.LayerNorm, or freeze it and call eval() on it"
            )
        frozen.append((described, module))
    return frozen
