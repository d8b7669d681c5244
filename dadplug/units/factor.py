"""A weight, and perhaps a bias, whose gradients are sent as factors."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..exchange.payload import FactorPayload
from ..hooks import LINEAR, CapturedLayer, Factor, Form, OwnHook, stack_by_form
from .base import Unit
from .lazy_gradient import Placeholders, accumulated, is_agreed, mark_agreed

_SMALL = 1 << 16  # elements that may be held in any case


class FactorUnit(Unit):
    """A weight, and perhaps a bias, whose gradients are sent as factors.

    Several layers share one unit where they share the weight; their rows stack.

    Args:
        weight: name of the weight.
        bias: name of the bias, or None.
        parameters: both, by name.
        layers: the captured layers that use them.
        path: ``"factors"``: rows are sent; ``"lowrank"``: matrices are compressed, see `dadplug.units.lowrank`.
        form: the form in which the factors are sent, or None if it depends on the layers' inputs.

    Attributes:
        outside: whether the weight has been used outside of its layer too, or in a second derivative.
        reduction: number of the reduction that the unit belongs to.
        sent_gradient: computes what has been sent of a parameter's gradient in this step.
    """

    reduction = -1

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
        self.form = LINEAR if path == "lowrank" else form
        self.outside = False
        self._held: list[Factor] = []
        self._taken_keys: list[int] = []
        self._formed: dict[Form, int] = {}  # rows whose gradient has been formed and added to `.grad`
        self._sent_factors: list[Factor] = []  # what has gone to a bucket, where it is small
        self._weights_then: set[tuple[int, int]] = set()  # what the weight was when gradients arrived
        self._placeholders = Placeholders(parameters, self)
        self.sent_gradient: Callable[[str], list[Tensor]] | None = None
        for name, parameter in parameters.items():
            self._hooks.append(parameter.register_hook(OwnHook(partial(self._before_dense, name))))
            hook = OwnHook(partial(self._after_dense, name))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _before_dense(self, name: str, gradient: Tensor | None) -> None:
        """Prepare for autograd adding to ``.grad``; called before it does, and before factors arrive."""
        self.drop_cleared()
        if gradient is not None:
            self._placeholders.lift(name)
            self.dense = self.outside = True

    def _after_dense(self, name: str, parameter: Tensor) -> None:
        """Put the placeholder of a bias back; that of the weight comes back with its arrival."""
        if name != self.name and self._placeholders:
            self._placeholders.put()

    def drop_cleared(self) -> bool:
        gone = self._placeholders.gone()
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
        self._placeholders.drop(gone, self.read_gradient)
        for part in self._parts(kept):
            self._placeholders.add(kept, part)
        self._forget_factors()
        self.dense = True

    def discard(self) -> None:
        self._placeholders.drop(self._placeholders.names, self.read_gradient)
        super().discard()
        self._forget_factors()
        self._formed.clear()
        self._taken_keys.clear()

    def _forget_factors(self) -> None:
        self._held = []
        self._sent_factors = []
        for layer in self.layers:
            layer.clear()

    def read_gradient(self, name: str) -> Tensor:
        earlier = self._placeholders.earlier(name)
        gradient = None if earlier is None else earlier.clone()
        for part in self._parts(name):
            gradient = accumulated(gradient, part, self.parameters[name])
        return torch.zeros_like(self.parameters[name]) if gradient is None else gradient

    def _parts(self, name: str) -> list[Tensor]:
        """Form what the factors that are here add to a parameter's gradient."""
        left = self.sent and not self.void
        here = self._peek() + (self._sent_factors if left else [])
        factors = stack_by_form([factor.to(self.lead.dtype) for factor in here])
        parts = [factor.gradient() if name == self.name else factor.bias_gradient() for factor in factors]
        if left and not self._sent_factors and self.sent_gradient is not None:
            parts += self.sent_gradient(name)
        return parts

    def own_gradient(self, name: str) -> Tensor:
        self._check_here(name)
        self.form_gradients()
        self.dense = True
        own = self._placeholders.earlier(name)
        return self._placeholders.add(name, torch.zeros_like(self.parameters[name])) if own is None else own

    def may_change(self) -> bool:
        return not self.sent or self.void or bool(self._sent_factors)

    def reclaim(self) -> bool:
        """Take back what has gone to a bucket, where its factors are still here; return whether they are.

        The other sites drop what they have got of it, and get what is here by the end of the step.
        """
        if not self._sent_factors:
            return False
        self._held = self._sent_factors + self._held
        self._sent_factors = []
        self._taken_keys.clear()
        self.void = True
        return True

    def _is_small(self, factors: Sequence[Factor]) -> bool:
        """Return whether factors may stay after they have left: in the room of the gradient that will be formed."""
        room = max(self.lead.numel(), _SMALL)
        for factor in factors:
            room -= factor.activations.numel() + factor.deltas.numel()
        return room >= 0

    def release_sent(self) -> None:
        """Let go of what has gone to a bucket; no more of it can arrive in this step."""
        self._sent_factors = []

    def before_header(self) -> None:
        """Take back what makes no sense any more, before the other sites are told of this one's step."""

    @property
    def weight_changed(self) -> bool:
        """Whether the weight is another than when a gradient arrived."""
        return not self._weights_then <= {(self.lead._version, self.lead.data_ptr())}

    def _check_here(self, name: str) -> None:
        if self.sent and not self.void and not self.reclaim():
            raise RuntimeError(
                f"the gradient of {name!r} is on its way to the other sites: call reduction.synchronize() before you "
                "change it or clear a part of it, or run backward() inside reduction.no_sync()"
            )

    def show_arrival(self) -> None:
        """Put placeholders into ``.grad``: clearing, reading and changing it then act on what has arrived."""
        self._weights_then.add((self.lead._version, self.lead.data_ptr()))
        self._placeholders.put()

    def abandon(self) -> None:
        """Leave placeholders in ``.grad`` that raise an error when read, since what they stand for is not here."""
        self._placeholders.drop(self._placeholders.names, None)

    def resolve(self) -> None:
        """Take the placeholders off as synchronization begins; what a program has put into ``.grad`` is all-reduced."""
        self._placeholders.resolve()
        if not all(is_agreed(parameter, self.reduction) for parameter in self.parameters.values()):
            self.dense = True

    def resolve_alone(self) -> None:
        """Take the placeholders off where nothing is to be synchronized; what is formed stays in ``.grad``."""
        self._placeholders.resolve()

    def mark_agreed(self) -> None:
        """Remember that all sites have the same in ``.grad``, at the end of a step."""
        for parameter in self.parameters.values():
            mark_agreed(parameter, self.reduction)

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the two rows that are sent."""
        return self.shape if self.form is None else self.form.widths(self.shape)

    @property
    def fed_by_data(self) -> bool:
        """Whether a layer has had an input that needs no gradient."""
        return any(layer.fed_by_data for layer in self.layers)

    def _peek(self) -> list[Factor]:
        return self._held + self._arrived()

    def _arrived(self) -> list[Factor]:
        """Return what the layers have committed and nobody has taken."""
        if len(self.layers) == 1:
            return self.layers[0].peek()
        return [factor for layer in self.layers for factor in layer.peek()]

    @property
    def rows(self) -> int:
        """Number of rows that have arrived; of matrices where those are compressed."""
        return sum(factor.rows for factor in self._peek()) + sum(self._formed.values())

    @property
    def row_keys(self) -> list[int]:
        """Numbers of the calls whose rows are sent in this step, in the order of the rows; empty without traces."""
        return self._taken_keys + _keys(self._peek())

    def complete(
        self, shares: Sequence[FactorPayload], known: dict[str, list[FactorPayload]]
    ) -> list[FactorPayload] | None:
        """Adds to what arrived what the sites do not send, since it follows from what others sent.

        Args:
            shares: what arrived, by site.
            known: complete shares by unit.

        Returns:
            Complete shares, or None if what they follow from is not there yet.
        """
        return list(shares)

    @property
    def forms(self) -> set[Form]:
        """The forms in which rows have arrived."""
        return {factor.form for factor in self._peek()} | set(self._formed)

    def take(self) -> Factor | None:
        """Hands over the factors that have arrived, stacked and in the weight's type; None where there are none.

        Rows in another form than the agreed one, as of images of another size, become a dense gradient.
        """
        factors = self._collect()
        self._sent_factors = factors if self._is_small(factors) else []
        if not factors:
            return None
        fitting = None
        for factor in stack_by_form(factors):
            if factor.form == self.form:
                fitting = factor
            else:
                self._form(factor)
                self.dense = True
        return fitting

    def _collect(self) -> list[Factor]:
        factors, self._held = self._held, []
        for layer in self.layers:
            factors = factors + layer.take()
        if not factors:
            return factors
        self._taken_keys += _keys(factors)
        dtype = self.lead.dtype
        return [factor.to(dtype) for factor in factors]

    def prepare(self, owned: Container[int], *, exact: bool) -> None:
        """Prepare for sending or holding factors that have arrived.

        Inputs from data are copied where they are held, since a loader may reuse its buffers. If factors have left
        already, a method that compresses takes them back, to compress the whole.

        Args:
            owned: addresses of memory that the user owns.
            exact: whether the method is exact.
        """
        if self.sent and not self.void and not exact:
            self.reclaim()
        if self.sent or self._is_small(self._arrived()):
            for layer in self.layers:
                layer.keep_inputs(owned)

    def keep(self, owned: Container[int] = ()) -> None:
        """Hold factors that cannot leave yet, in no more room than a gradient where they may be one.

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

    def _condense(self) -> None:
        """Turn the factors into what takes no more room than a gradient."""
        self.form_gradients()
        self.dense = True

    def form_gradients(self) -> None:
        """Adds the gradients of what has arrived to ``.grad``, as autograd would have."""
        for factor in stack_by_form(self._collect()):
            self._form(factor)

    def _form(self, factor: Factor) -> None:
        self._formed[factor.form] = self._formed.get(factor.form, 0) + factor.rows
        self._placeholders.add(self.name, factor.gradient())
        if self.bias is not None:
            self._placeholders.add(self.bias, factor.bias_gradient())

    def begin_step(self) -> None:
        super().begin_step()
        self._placeholders.end_step()
        self._sent_factors = []
        self._weights_then.clear()
        self.sent_gradient = None
        self.outside = False
        self._formed.clear()
        self._taken_keys.clear()


def _keys(factors: Sequence[Factor]) -> list[int]:
    return [factor.trace.key for factor in factors if factor.trace is not None]
