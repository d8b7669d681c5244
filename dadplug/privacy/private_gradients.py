"""Private gradients of a model: captured per sample, clipped over the whole model, summed and noised."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import PrivacyError
from ..hooks import LINEAR, CapturedLayer, Factor, Form, LayerCapture, OwnHook, overridden
from ..hooks.affine import SampleNorm, has_sample_gradients
from ..methods.feedback import LossScales
from ..model_sync.samples import SampleCounter
from ..units.lazy_gradient import Placeholders
from .clipping import Batch, clipped_sums
from .differential_privacy import DifferentialPrivacy
from .noise import NoiseSource
from .refusals import check_model


class _Call:
    """Recorder of one call of a captured layer; see `dadplug.hooks.Recorder`."""

    by_sample = True

    def __init__(self, owner: PrivateGradients, layer: CapturedLayer, inputs: Tensor) -> None:
        self._owner = weakref.ref(owner)
        self._layer = layer
        self._origin = owner.origin()

    def __call__(self, activations: Tensor, deltas: Tensor, form: Form = LINEAR) -> None:
        owner = self._owner()
        if owner is not None and not owner.released:
            batch = owner.batch(self._origin)
            batch.factors.append((self._layer, Factor(activations, deltas, form)))


class PrivateGradients:
    """The gradients of a site's samples, each clipped to a norm, their sum, and noise.

    All rows that one backward pass records for the i-th sample count together, over all calls of all layers, before
    the norm is taken. So each sample may be in one backward pass of a step. Sums of the backward passes of a step, as
    with accumulation, add up; `release` adds the noise once, and writes ``.grad``.

    Args:
        model: the model.
        privacy: the setting.
        counter: counts the samples of forward passes.
        scales: the loss scales of backward passes.
        arrived: called at the end of each backward pass that has recorded anything.
        fastest: whether linear layers may compute by a faster library, whose rounding differs.

    Attributes:
        reduction: marks placeholders, see `dadplug.units.lazy_gradient`.
        released: whether the hooks have been removed.

    Raises:
        PrivacyError: if the model has parameters or layers that cannot be trained privately; the message names them.
    """

    reduction = -2

    def __init__(
        self,
        model: nn.Module,
        privacy: DifferentialPrivacy,
        counter: SampleCounter,
        scales: LossScales,
        arrived: Callable[[], None],
        *,
        fastest: bool,
    ) -> None:
        self._model = model
        self.privacy = privacy
        self._counter = counter
        self._scales = scales
        self._on_arrival = arrived
        self._fastest = fastest
        self.released = False
        self._source = NoiseSource(privacy.secure)
        self._batches: dict[int, Batch] = {}  # by backward pass that is running
        self._parents: dict[int, int] = {}  # of backward passes within others, as for reentrant checkpoints
        self._done: list[Batch] = []
        self._used: set[int] = set()  # forward passes of this step through which backward has run
        self._sums: dict[str, Tensor] = {}
        self._last_size: int | None = None
        self._trained: tuple[int, ...] = ()
        self._attach()

    # Hooks

    def _attach(self) -> None:
        check_model(self._model)
        parameters = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        self._trained = tuple(id(each) for each in parameters.values())
        self._capture = LayerCapture(self._model, weight_gradients=False, fastest=self._fastest)
        for layer in self._capture.layers.values():
            layer.wrap_recorder = lambda layer, inputs, record: _Call(self, layer, inputs)
        norms = [each for each in self._model.modules() if has_sample_gradients(each) and not overridden(each)]
        self._norms = [SampleNorm(each, self._record_norm) for each in norms]
        self._parameters = parameters
        self._placeholders = Placeholders(parameters, self)
        self._hooks = [each.register_hook(OwnHook(partial(self._outside, name))) for name, each in parameters.items()]
        self._buffers = {name: (each, each._version) for name, each in self._model.named_buffers()}

    def _detach_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for norm in self._norms:
            norm.restore()
        self._capture.detach()

    def _outside(self, name: str, gradient: Tensor | None) -> None:
        """Refuse a gradient that autograd forms, which is the sum over samples."""
        if gradient is not None:
            self._batches.clear()
            raise PrivacyError(
                f"autograd formed a gradient of {name!r}, which cannot be clipped by sample: the parameter is used "
                "outside of its layer's forward, or has hooks of its own, or backward(create_graph=True) was called. "
                "Call the layer itself, or freeze the parameter"
            )

    def _record_norm(self, module: nn.Module, inputs: Tensor) -> Callable[[Tensor | None, Tensor | None], None]:
        origin, owner = self.origin(), weakref.ref(self)

        def record(of_scale: Tensor | None, of_shift: Tensor | None) -> None:
            private = owner()
            if private is None or private.released:
                return
            formed = private.batch(origin).formed
            for name, gradients in (("weight", of_scale), ("bias", of_shift)):
                parameter = module._parameters.get(name)
                if gradients is not None and parameter is not None:
                    formed.append((parameter, gradients))

        return record

    def origin(self) -> tuple[int, int | None, int]:
        """Return forward pass, samples and backward pass in which a layer is called; the last is -1 outside of one."""
        within = torch._C._current_graph_task_id()
        if within != -1:  # a checkpoint computes anew
            self._open(self._root(within))
        return self._counter.forwards, self._counter.batch, within

    def _root(self, backward_pass: int) -> int:
        while backward_pass in self._parents:
            backward_pass = self._parents[backward_pass]
        return backward_pass

    def _open(self, root: int) -> Batch:
        """Return the batch of a backward pass, made at the first call in it, where this is running."""
        if root not in self._batches:
            self._batches[root] = Batch(self._scales.present().value)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, root))
        return self._batches[root]

    def batch(self, origin: tuple[int, int | None, int]) -> Batch:
        """Return the batch of the running backward pass, and add a call to it.

        Args:
            origin: where the layer was called, as `origin` has returned it.

        Raises:
            PrivacyError: if two batches of different sizes meet, or backward has run through the forward pass before.
        """
        forward, samples, within = origin
        now = torch._C._current_graph_task_id()
        if within not in (-1, now):
            self._parents[now] = within
        batch = self._open(self._root(now))
        if within == -1:
            if forward in self._used:
                raise PrivacyError(
                    "two backward passes ran through one forward pass, so that a sample's gradient would be clipped in "
                    "parts: add up the losses, and call backward() once"
                )
            batch.forwards.add(forward)
            if samples is not None and batch.samples not in (None, samples):
                raise PrivacyError(
                    f"one backward pass has batches of {batch.samples} and {samples} samples: the rows of a sample "
                    "must have the same place in all calls"
                )
            batch.samples = batch.samples if samples is None else samples
        return batch

    def _finish(self, root: int) -> None:
        """Hold what a backward pass has recorded, at its end; not called where it fails."""
        batch = self._batches.pop(root, None)
        self._parents.clear()
        if batch is None:
            return
        self._used |= batch.forwards
        self._done.append(batch)
        self._placeholders.put()
        self._on_arrival()

    # A step

    @property
    def holds_gradients(self) -> bool:
        """Whether backward passes of this step have delivered anything."""
        return bool(self._done or self._sums)

    def before_forward(self) -> None:
        """Clip and add up what earlier backward passes have recorded, before another forward pass takes memory."""
        if torch._C._current_graph_task_id() != -1:
            return
        self._batches.clear()
        self._parents.clear()
        trained = tuple(id(each) for each in self._model.parameters() if each.requires_grad)
        if trained != self._trained:
            if self.holds_gradients:
                raise PrivacyError("parameters were frozen or freed within a step: call synchronize() before")
            self._detach_hooks()
            self._attach()
        self._clip()

    def drop_cleared(self) -> bool:
        """Discard what has arrived if the program has cleared it since; return whether that was all of it.

        Raises:
            PrivacyError: if only some gradients have been cleared.
        """
        gone = self._placeholders.gone()
        if not gone:
            return False
        if len(gone) < len(self._parameters):
            rest = next(name for name in self._parameters if name not in gone)
            raise PrivacyError(
                f"the gradient of {gone[0]!r} was cleared or replaced before synchronize(), that of {rest!r} was not: "
                "gradients are clipped over the whole model. Clear all of them, and change gradients after "
                "synchronize()"
            )
        self.discard()
        return True

    def discard(self) -> None:
        """Forget the backward passes of this step; their noise has not been drawn."""
        self._placeholders.drop(self._placeholders.names, None)
        self._done.clear()
        self._sums.clear()
        self._batches.clear()
        self._used.clear()

    @torch.no_grad()
    def _clip(self) -> None:
        """Clip the gradients of each sample, and add them up."""
        while self._done:
            batch = self._done[0]
            for name, value in clipped_sums(batch, self._parameters, self.privacy).items():
                self._sums[name] = self._sums[name].add_(value) if name in self._sums else value
            del self._done[0]

    @torch.no_grad()
    def release(self, scale: float) -> None:
        """Add the noise to this step's sum, and write the site's private gradient to ``.grad``.

        Args:
            scale: the loss scale that gradients have to contain.

        Raises:
            PrivacyError: if ``.grad`` holds something else, or a buffer has been changed by data.
        """
        self._check_buffers()
        self._batches.clear()
        self._clip()
        self._placeholders.resolve()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and bool(parameter.grad.any()):
                raise PrivacyError(
                    f".grad of {name!r} holds a gradient that is not of this step: call zero_grad() before backward"
                )
        expected = self.privacy.expected_batch
        assert expected is not None
        deviation = self.privacy.noise_multiplier * self.privacy.max_grad_norm
        for name, parameter in self._parameters.items():
            total = self._sums.pop(name, None)
            if total is None:
                total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = self._source.add_to(total, deviation).mul_(scale / expected)
        self._sums.clear()
        self._used.clear()

    def end_step(self) -> None:
        """Give programs that have kept a placeholder the agreed gradient."""
        self._placeholders.end_step()

    def _check_buffers(self) -> None:
        for name, (buffer, version) in self._buffers.items():
            if buffer._version != version and buffer.is_floating_point() and self.holds_gradients:
                raise PrivacyError(
                    f"buffer {name!r} was changed in training, so that it may show data: the noise does not protect it"
                )

    def detach(self) -> None:
        """Remove all hooks; gradients that have not been released are dropped."""
        if not self.released:
            self.discard()
            self.released = True
            self._detach_hooks()

    # The source of placeholders

    def read_gradient(self, name: str) -> Tensor:
        """Refuse to show a gradient without noise."""
        raise PrivacyError(
            f"the gradient of {name!r} is private, and has no noise yet: read it after reduction.synchronize()"
        )

    def own_gradient(self, name: str) -> Tensor:
        """Refuse to change a gradient before it is clipped by sample."""
        return self.read_gradient(name)

    def may_change(self) -> bool:
        """Return whether the gradient may be changed: never before it is private."""
        return False
