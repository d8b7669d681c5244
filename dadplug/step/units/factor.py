"""Units whose gradients are sent as factors: as they are, compressed to a low rank, or as one side of a chain."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor, nn

from ...exchange.codec import register
from ...exchange.factor_buckets import FactorPayload
from ...exchange.wire import copied
from ...hooks import LINEAR, CapturedLayer, Elementwise, Factor, Form, LayerCapture, OwnHook, stack_by_form
from ...hooks.registry import is_accumulated
from ..methods.base import GradientPath
from .base import Arrived, DenseUnit, Placeholders, Unit, accumulated, is_agreed, is_cleared, unmark_agreed

_SMALL = 1 << 16  # elements that may be held in any case
_COMMITTED = attrgetter("committed")
_FED = attrgetter("fed_by_data")


class SentGradients(Protocol):
    """Sender of factors, which can form this site's gradients of them again."""

    def sent_gradient(self, unit: FactorUnit, name: str) -> list[Tensor]:
        """Return what this site has sent of a parameter's gradient in this step, in parts."""


class FactorUnit(Unit):
    """A weight, and perhaps a bias, whose gradients are sent as factors.

    Layers that share the weight have one unit; their rows are stacked.

    Args:
        weight: name of the weight.
        bias: name of the bias, or None.
        parameters: both, by name.
        layers: the captured layers that use them.
        path: the path of the gradients; `GradientPath.LOWRANK` for a `dadplug.step.units.factor.LowrankUnit`.
        form: the form in which the factors are sent, or None if it depends on the layers' inputs.

    Attributes:
        outside: whether the weight has been used outside of its layer in this step, or in a second derivative.
        sender: reference to what sends the factors, see `SentGradients`; None where nothing does.
        unformed: gradient of a `LowrankUnit` that is formed when it is compressed, as a factor; None for none.
        sent_factors: factors that have been put into a bucket; None where they are not held, since they are large, or
            backward has ended.
        last_rows: rows of the layers' inputs in the last step in which there were any; of matrices where those are
            compressed.
    """

    last_rows = 0
    unformed: Factor | None = None
    _at_first = Unit._at_first | {"outside": False, "sent_factors": ()}

    def __init__(
        self,
        weight: str,
        bias: str | None,
        parameters: dict[str, nn.Parameter],
        layers: list[CapturedLayer],
        path: str,
        form: Form | None,
    ) -> None:
        super().__init__(weight, parameters)
        self.bias = bias
        self.layers = layers
        self.path = path
        self.form = LINEAR if path == GradientPath.LOWRANK else form
        self.outside = False
        self._held: list[Factor] = []
        self._taken_keys: list[int] = []
        self._formed: dict[Form, int] = {}  # rows whose gradient has been formed and added to `.grad`
        self.sent_factors: Sequence[Factor] | None = ()
        self._weights_then: set[tuple[int, int]] = set()  # version and address of the weight when gradients arrived
        self.placeholders = Placeholders(parameters, self)
        self.placed = self.placeholders.active
        self._last_pass = -1  # number of the last backward pass that has reached a parameter
        self._room = max(self.lead.numel(), _SMALL)
        self._of_step = self.placeholders, self._formed, self._taken_keys, self._weights_then
        self.sender: Callable[[], SentGradients | None] = lambda: None
        for name, parameter in parameters.items():
            self._hooks.append(parameter.register_hook(OwnHook(self._before_gradient, name)))
            if name != weight:  # that of the weight is part of its arrival
                hook = OwnHook(self._after_dense, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _before_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Prepare for a gradient; called before autograd adds to ``.grad`` or returns it, and before factors arrive."""
        now = torch._C._current_graph_task_id()
        if now != self._last_pass:  # for weight and bias once
            self._last_pass = now
            if self.placeholders.active:
                self.drop_cleared()
        if gradient is not None and is_accumulated(self.parameters[name]):
            self.placeholders.lift(name)
            self._before_dense(name)

    def _before_dense(self, name: str) -> None:
        """Prepare for autograd adding to ``.grad``."""
        self.dense = self.outside = True

    def _arrive(self, on_arrival: Arrived, parameter: Tensor) -> None:
        self._weights_then.add((self.lead._version, self.lead.data_ptr()))
        super()._arrive(on_arrival, parameter)

    def _after_dense(self, name: str, parameter: Tensor) -> None:
        """Put the placeholder of a bias back; that of the weight comes back with its arrival."""
        if self.placeholders.lifted:
            self.placeholders.put()

    def drop_cleared(self) -> bool:
        gone = self.placeholders.gone()
        if not gone:
            return False
        if len(gone) < len(self.parameters):
            self._keep_rest(gone)
            return False
        self.discard()
        return True

    def _keep_rest(self, gone: Sequence[str]) -> None:
        """Form the gradient of the weight or of the bias, where that of the other has been cleared."""
        kept = next(name for name in self.parameters if name not in gone)
        self._check_here(kept)
        self.placeholders.drop(gone, self.read_gradient)
        for part in self._parts(kept):
            self.placeholders.add(kept, part)
        self._forget_factors()
        self.dense = True

    def discard(self) -> None:
        self.placeholders.drop(list(self.placeholders.active), self.read_gradient)
        super().discard()
        self._forget_factors()
        self._formed.clear()
        self._taken_keys.clear()

    def _forget_factors(self) -> None:
        self._held = []
        self.sent_factors = ()
        for layer in self.layers:
            layer.clear()

    def read_gradient(self, name: str) -> Tensor:
        earlier = self.placeholders.earlier(name)
        gradient = None if earlier is None else earlier.clone()
        for part in self._parts(name):
            gradient = accumulated(gradient, part, self.parameters[name])
        return torch.zeros_like(self.parameters[name]) if gradient is None else gradient

    def _parts(self, name: str) -> list[Tensor]:
        """Form what the factors that are here add to a parameter's gradient."""
        left = self.sent and not self.void
        here = [*self._peek(), *((self.sent_factors or ()) if left else ())]
        factors = stack_by_form([factor.to(self.lead.dtype) for factor in here])
        parts = [factor.gradient() if name == self.name else factor.bias_gradient() for factor in factors]
        if left and self.sent_factors is None and (sender := self.sender()) is not None:
            parts += sender.sent_gradient(self, name)
        return parts

    def own_gradient(self, name: str) -> Tensor:
        self.drop_cleared()  # what is formed below adds to what is left
        self._check_here(name)
        self.form_gradients()
        self.dense = self.changed = True
        own = self.placeholders.earlier(name)
        return self.placeholders.add(name, torch.zeros_like(self.parameters[name])) if own is None else own

    def may_change(self) -> bool:
        return not self.sent or self.void or self.sent_factors is not None

    def reclaim(self) -> bool:
        """Take the factors back that have been put into a bucket, if they are still held; return whether they are.

        The other sites drop the payload, and get the factors of the end of the step.
        """
        if self.sent_factors is None:
            return False
        self._held = [*self.sent_factors, *self._held]
        self.sent_factors = ()
        self._taken_keys.clear()
        self.void = True
        return True

    def _is_small(self, factors: Sequence[Factor]) -> bool:
        """Return whether sent factors may be held: they take no more memory than the gradient that will be formed."""
        room = self._room
        for factor in factors:
            room -= factor.activations.numel() + factor.deltas.numel()
        return room >= 0

    @property
    def is_large(self) -> bool:
        """Whether the factors that have arrived take more memory than the gradient."""
        return not self._is_small(self._peek())

    def put_back(self, factor: Factor) -> None:
        """Hold factors again that `take` has returned, after `begin_step`; those of the weight alone.

        Args:
            factor: the factors; the bias's gradient, where there is one, stays as it has been formed.
        """
        if self.bias is not None:
            factor = replace(factor, bias=torch.zeros_like(self.parameters[self.bias]))
        self._held = [factor, *self._held]
        self.arrivals += 1
        self.placeholders.put()

    @property
    def weight_changed(self) -> bool:
        """Whether the weight has changed since a gradient arrived."""
        return not self._weights_then <= {(self.lead._version, self.lead.data_ptr())}

    def _check_here(self, name: str) -> None:
        if self.sent and not self.void and not self.reclaim():
            raise RuntimeError(
                f"the gradient of {name!r} is on its way to the other sites: call reduction.synchronize() before you "
                "change it or clear a part of it, or run backward() inside reduction.no_sync()"
            )

    def resolve(self) -> None:
        """Remove the placeholders as synchronization begins."""
        if self.placeholders.resolve():
            self.take_formed()

    def take_formed(self) -> None:
        """Account for what ``.grad`` holds as synchronization begins: it is all-reduced."""
        for parameter in self.parameters.values():
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:  # which would come out dense
                self.dense |= not is_agreed(parameter, self.reduction)
            else:  # an agreed one that is left counts, too: other sites may have cleared theirs
                self.dense |= not is_cleared(gradient)

    def leave(self, *, discard: bool) -> None:
        self.drop_cleared()
        if discard:
            self.discard()
        elif self.sent and not self.void and not self.reclaim():  # what is not held any more raises an error when read
            self.placeholders.drop(list(self.placeholders.active), None)
        self.form_gradients()
        self.placeholders.resolve()
        for parameter in self.parameters.values():
            if self.arrivals and parameter.grad is not None:  # an agreed one has been added to
                unmark_agreed(parameter.grad)
        super().leave(discard=discard)

    @property
    def table_size(self) -> int:
        return self.lead.numel() if self.form is not None and self.form.table_rows and not self.form.sparse else 0

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the two rows that are sent."""
        return self.shape if self.form is None else self.form.widths(self.shape)

    @property
    def fed_by_data(self) -> bool:
        """Whether a layer has had an input that needs no gradient."""
        return any(map(_FED, self.layers))

    @property
    def left_out(self) -> str:
        """Why a call of a layer has been left to autograd; empty if none has."""
        return next((layer.left_out for layer in self.layers if layer.left_out), "")

    def _peek(self) -> list[Factor]:
        """Return the factors that are here, without taking them; the list is not to be changed."""
        arrived = self._arrived()  # which may hold some
        return self._held + arrived if self._held else arrived

    def _arrived(self) -> list[Factor]:
        """Return the factors that the layers have committed and that have not been taken."""
        if self.unformed is not None:
            self._settle()
        if len(self.layers) == 1:
            return self.layers[0].committed
        return [factor for layer in self.layers for factor in layer.committed]

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has arrived, or all that has arrived has been taken."""
        if self._formed or self._held or self.unformed is not None:
            return False
        return not any(map(_COMMITTED, self.layers))

    @property
    def rows(self) -> int:
        """Number of rows that have arrived; of matrices where those are compressed."""
        return sum([factor.rows for factor in self._peek()]) + sum(self._formed.values())

    @property
    def row_keys(self) -> list[int]:
        """Keys of the calls whose rows are sent in this step, in the order of the rows; empty without traces."""
        return self._taken_keys + _keys(self._peek())

    def complete(
        self, payloads: list[FactorPayload], known: Mapping[str, list[FactorPayload]]
    ) -> list[FactorPayload] | None:
        """Complete payloads by what the sites do not send, since it can be computed from other payloads.

        Args:
            payloads: what has arrived, by sender.
            known: complete payloads, by name of the unit and sender.

        Returns:
            The complete payloads; None if those that they are computed from are not complete yet.
        """
        return payloads

    @property
    def forms(self) -> set[Form]:
        """The forms in which rows have arrived."""
        return {factor.form for factor in self._peek()} | set(self._formed)

    def take(self) -> Factor | None:
        """Return the factors that have arrived, and forget them: stacked, in the weight's type; None without any.

        Rows in another form than the agreed one, such as those of images of another size, become a dense gradient.
        """
        rows = sum(self._formed.values())
        factors = self._collect(sends=True)
        for factor in factors:
            rows += factor.deltas.shape[0]
        self.last_rows = rows or self.last_rows
        if len(factors) == 1 and factors[0].form == self.form:
            return factors[0]
        fitting: Factor | None = None
        for factor in stack_by_form(factors):
            if factor.form == self.form:
                fitting = factor
            else:
                self._form(factor)
                self.dense = True
        self._hold_sent_alone(factors, [factor for factor in factors if factor.form == self.form])
        return fitting

    def _collect(self, sends: bool = False) -> list[Factor]:
        """Return the factors that have arrived in the weight's type, and forget them.

        Args:
            sends: whether they are sent; small ones are held then, as `sent_factors`.
        """
        if self.unformed is not None:
            self._settle()
        factors, self._held = self._held, []
        for layer in self.layers:
            if layer.committed:
                factors = factors + layer.take()
        dtype, room = self.lead.dtype, self._room
        for place, factor in enumerate(factors):
            if sends and factor.trace is not None:
                self._taken_keys.append(factor.trace.key)
            if not (factor.activations.dtype == factor.deltas.dtype == dtype and factor.bias is None):
                factors[place] = factor.to(dtype)
            room -= factor.activations.numel() + factor.deltas.numel()
        if sends:
            self.sent_factors = factors if room >= 0 else None
        return factors

    def _hold_sent_alone(self, taken: Sequence[Factor], sent: Sequence[Factor]) -> None:
        """Hold no factors as sent that have been taken and formed; they are in ``.grad`` already."""
        if self.sent_factors is not None and len(sent) < len(taken):
            self.sent_factors = sent

    def take_held(self) -> list[Factor]:
        """Return the factors that have arrived, in the weight's type, and hold them no longer."""
        return self._collect()

    def hold(self, factors: list[Factor]) -> None:
        """Hold factors, where none are held."""
        self._held = factors

    def _settle(self) -> None:
        """Form a gradient that is not formed yet."""

    def hold_sent(self, owned: Container[int]) -> None:
        """Copy inputs in `sent_factors` that a program may overwrite, for example a buffer that a loader fills.

        Args:
            owned: addresses of memory that the user owns.
        """
        fed = any(map(_FED, self.layers))
        for factor in self.sent_factors or ():
            if fed or factor.activations.untyped_storage().data_ptr() in owned:
                sent = self.sent_factors or ()
                self.sent_factors = [replace(each, activations=each.activations.clone()) for each in sent]
                return

    def keep(self, owned: Container[int] = ()) -> None:
        """Hold factors that cannot be sent yet, in no more memory than a gradient where they may be one.

        Inputs that a program may overwrite are copied.

        Args:
            owned: addresses of memory that the user owns.
        """
        for layer in self.layers:
            layer.keep_inputs(owned)
        room = self.lead.numel()
        for factor in self._peek():
            if factor.form.may_be_dense:
                room -= factor.numel
        if room <= 0:
            self._condense()

    def set_aside(self) -> None:
        """Copy factors that are held to the end of backward out of the heap.

        There, activations that backward frees would leave gaps between them that are too small for gradients.
        """
        if self.lead.device.type == "cpu":
            for layer in self.layers:
                layer.copy_factors(copied)

    def _condense(self) -> None:
        """Replace the factors by something that takes no more memory than a gradient."""
        self.form_gradients()
        self.dense = True

    def form_gradients(self) -> None:
        """Add the gradients of the factors that have arrived to ``.grad``, as autograd would have."""
        for factor in stack_by_form(self._collect()):
            self._form(factor)

    def become_dense(self, capture: LayerCapture, arrived: Arrived) -> list[Unit]:
        """Form the gradients that have arrived, and stop capturing; return the dense units that replace this one.

        Args:
            capture: the capture of the layers.
            arrived: see `Unit.watch`.
        """
        self.form_gradients()
        self.release()
        for layer in self.layers:
            capture.release(layer.name)
        units: list[Unit] = [DenseUnit(name, parameter) for name, parameter in self.parameters.items()]
        for unit in units:
            unit.arrivals = self.arrivals
            unit.watch(arrived)
        return units

    def _form(self, factor: Factor) -> None:
        self._formed[factor.form] = self._formed.get(factor.form, 0) + factor.rows
        self.placeholders.add(self.name, factor.gradient())
        if self.bias is not None:
            self.placeholders.add(self.bias, factor.bias_gradient())


def _keys(factors: Sequence[Factor]) -> list[int]:
    return [factor.trace.key for factor in factors if factor.trace is not None]


class LowrankUnit(FactorUnit):
    """A weight whose gradient is compressed as a matrix, whatever forms its factors have.

    What autograd forms itself is compressed together with the factors: all of it where no layer has factors, else what
    comes from hooks, from other uses of the weight, and from changes of ``.grad``.

    Args:
        weight: name of the weight, of two dimensions or more.
        bias: name of the bias, or None.
        parameters: both, by name.
        layers: the captured layers that use them.
    """

    def __init__(
        self, weight: str, bias: str | None, parameters: dict[str, nn.Parameter], layers: list[CapturedLayer]
    ) -> None:
        super().__init__(weight, bias, parameters, layers, GradientPath.LOWRANK, LINEAR)
        self._aside: dict[str, Tensor | None] = {}  # what is in `.grad` already, while autograd forms a gradient

    def _before_dense(self, name: str) -> None:
        parameter = self.parameters[name]
        self._aside[name], parameter.grad = parameter.grad, None
        self.outside = bool(self.layers)

    def _arrive(self, on_arrival: Arrived, parameter: Tensor) -> None:
        if self._aside:
            self._after_dense(self.name, parameter)
        if (arrived := on_arrival()) is not None:
            arrived(self)

    def _after_dense(self, name: str, parameter: Tensor) -> None:
        gradient = None
        if name in self._aside:
            gradient, parameter.grad = parameter.grad, self._aside.pop(name)
            if gradient is not None:
                self._hold(name, gradient)
        if name != self.name and (gradient is not None or self.placeholders.lifted):
            self.placeholders.put()

    def _hold(self, name: str, gradient: Tensor) -> None:
        """Hold a gradient that has been formed, as a factor."""
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        out, width = self.shape
        if name == self.name:
            zeros = None if self.bias is None else gradient.new_zeros(self.parameters[self.bias].shape)
            factor = replace(Factor.formed(gradient), bias=zeros)
        else:
            factor = Factor(gradient.new_empty(0, width), gradient.new_empty(0, out), LINEAR, gradient)
        self._held.append(factor)
        if len(self._held) > 1:
            self._condense()

    def take_formed(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not is_agreed(parameter, self.reduction):
                gradient, parameter.grad = parameter.grad, None
                self._hold(name, gradient)

    @property
    def is_own(self) -> bool:
        return super().is_own or bool(self._held)  # `resolve` has taken it from ``.grad``

    def own_gradient(self, name: str) -> Tensor:
        own = super().own_gradient(name)
        self.dense = False  # it is compressed as it will be at the end of the step
        unmark_agreed(own)
        return own

    def hold_unformed(self, factor: Factor) -> None:
        """Hold a gradient that is formed when it is compressed, or asked for in another way.

        Args:
            factor: a factor with `Factor.write`.
        """
        self._settle()
        self.unformed = factor
        if self._held or self.bias is not None or self._is_small([factor]):  # small ones may be taken back
            self._settle()

    def _settle(self) -> None:
        if self.unformed is not None:
            factor, self.unformed = self.unformed, None
            self._hold(self.name, factor.gradient())

    def _forget_factors(self) -> None:
        self.unformed = None
        super()._forget_factors()

    def take_unformed(self) -> Factor | None:
        """Return what `take` does, or a factor with `Factor.write`, where the gradient has not been formed yet."""
        if self.unformed is None or self._held:
            return self.take()
        factor, self.unformed, self.sent_factors = self.unformed, None, None
        self.last_rows = factor.rows or self.last_rows
        return factor

    @property
    def rows(self) -> int:
        """Number of rows of the matrices that are compressed."""
        if self.unformed is not None:
            return self.unformed.rows
        return sum([factor.rows * factor.form.positions for factor in self._peek()])

    def take(self) -> Factor | None:
        factors, rows = self._collect(sends=True), 0
        for factor in factors:
            rows += factor.deltas.shape[0] * (1 if factor.form is LINEAR else factor.form.positions)
        self.last_rows = rows or self.last_rows
        if len(factors) == 1 and factors[0].form is LINEAR:
            return factors[0]
        return self._matrix(factors) if factors else None

    def _matrix(self, factors: list[Factor]) -> Factor:
        shape, with_bias = self.lead.shape, self.bias is not None
        if len(factors) == 1:
            return factors[0].matrix(shape, with_bias)
        # Rows of linear layers come first: stacked in their form, all stay rows, and no gradient is formed of many.
        ordered = sorted(stack_by_form(factors), key=lambda factor: factor.form != LINEAR)
        return Factor.stack([factor.matrix(shape, with_bias) for factor in ordered]).matrix(shape, with_bias)

    def _condense(self) -> None:
        self._held = [self._matrix(self._collect())]


register(Elementwise)


@register
@dataclass(frozen=True)
class ChainLink:
    """Link from a layer to the next one of its chain.

    Attributes:
        follower: name of the unit whose layer has the output as its input.
        function: the function between the two.
    """

    follower: str
    function: Elementwise


class ChainedUnit(FactorUnit):
    """A unit that sends activations alone, since its deltas follow from those of another unit.

    Rows of the two are matched call by call: this unit's rows are the first ones of the follower's. Rows without a
    match, since a step took another way through the model, become a dense gradient.

    Args:
        unit: the unit that it replaces.
        link: the link to the unit that follows.
    """

    def __init__(self, unit: FactorUnit, link: ChainLink) -> None:
        super().__init__(unit.name, unit.bias, unit.parameters, unit.layers, GradientPath.ACTIVATIONS, LINEAR)
        self.arrivals, self.expected = unit.arrivals, unit.expected
        self.dense, self.outside = unit.dense, unit.outside
        self.link = link
        self.follower: FactorUnit = unit  # until all units of the plan have been replaced
        self.unsent = unit.lead.new_empty(0, unit.shape[0])  # the deltas of what was taken last
        self._accepted: list[int] = []
        self._refused: set[int] = set()
        self._of_step = (*self._of_step, self._accepted, self._refused)

    @property
    def widths(self) -> tuple[int, int]:
        return 0, self.shape[1]

    @property
    def row_keys(self) -> list[int]:
        follower_keys = self.follower.row_keys
        for factor in self._peek():
            trace = factor.trace
            if trace is None or trace.key in self._refused or trace.key in self._accepted:
                continue
            place = len(self._accepted)
            fits = (
                trace.function == self.link.function
                and follower_keys[place : place + 1] == [trace.follower_key]
                and not self.follower.weight_changed
            )
            if fits:
                self._accepted.append(trace.key)
            else:
                self._refused.add(trace.key)
        return self._accepted

    def take(self) -> Factor | None:
        accepted = set(self.row_keys)
        self.last_rows = self.rows or self.last_rows
        fitting: list[Factor] = []
        others: list[Factor] = []
        for factor in self._collect(sends=True):
            fits = factor.trace is not None and factor.trace.key in accepted
            (fitting if fits else others).append(factor)
        for factor in stack_by_form(others):
            self._form(factor)
            self.dense = True
        self._hold_sent_alone([*fitting, *others], fitting)
        if not fitting:
            return None
        activations = torch.cat([factor.activations for factor in fitting]) if fitting[1:] else fitting[0].activations
        self.unsent = torch.cat([factor.deltas for factor in fitting])
        return Factor(activations, activations.new_empty(len(activations), 0))

    def complete(
        self, payloads: list[FactorPayload], known: Mapping[str, list[FactorPayload]]
    ) -> list[FactorPayload] | None:
        followers = known.get(self.link.follower)
        if followers is None or any(own.rows > other.rows for own, other in zip(payloads, followers, strict=True)):
            return None
        weight = self.follower.lead.detach()
        complete = []
        for own, other in zip(payloads, followers, strict=True):
            matched = other.part(0, own.rows)
            deltas = self.link.function.backward(matched.left @ weight, matched.right)
            complete.append(FactorPayload(deltas.to(own.right.device), own.right))
        return complete

    @property
    def broken(self) -> bool:  # type: ignore[override]
        """Whether other sites would recompute deltas from others than this site had, or by another weight."""
        changed = self.follower.void or self.follower.weight_changed
        return self.sent and not self.void and bool(self._accepted) and changed

    def reclaim(self) -> bool:
        reclaimed = super().reclaim()
        if reclaimed:
            self._forget_matches()
        return reclaimed

    def discard(self) -> None:
        super().discard()
        self._forget_matches()

    def _forget_matches(self) -> None:
        self._accepted.clear()
        self._refused.clear()
