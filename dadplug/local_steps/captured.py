"""Gradients of one site's steps, of which those of linear layers are held as factors until an optimizer applies them.

No other site is involved: ``grad W = D^T A`` is computed from this site's rows alone, block by block, in the step.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from weakref import WeakMethod

import torch
from torch import nn

from ..exchange.factor_buckets import FactorPayload
from ..hooks import LINEAR, Factor, capturable_layers, family_of
from ..options import Options
from ..step.fused.products import Deferral, GradientProduct
from ..step.fused.steps import reasons_against
from ..step.methods import is_product, make_method
from ..step.model_sync.structure import ModelStructure
from ..step.planning.partition import partition_parameters
from ..step.units.base import Unit, add_gradient, begin_step
from ..step.units.factor import FactorUnit
from ..support.schedules import current


class CapturedGradients:
    """Capture of the gradients of a model's linear layers, as factors where an optimizer need not have them formed.

    From backward to the step, and after it, ``.grad`` of a captured weight is a placeholder: a program that reads it
    gets the gradient, formed, and one that changes it in place has it formed for good; ``zero_grad`` discards it, and
    further backward passes add to it, as autograd would. All other gradients are autograd's.

    Args:
        model: the model.
        optimizer: the optimizer that takes the steps.
        owned: addresses of memory that the program may overwrite after backward, such as that of inputs.

    Attributes:
        remarks: whether steps are fused, and the weights whose steps are not, with the reasons; one line each.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, owned: Container[int]) -> None:
        self._model, self._optimizer, self._owned = model, optimizer, owned
        self._method = make_method(Options(mode="dad"))
        self._constants = current().decoding
        self._found: dict[str, str] = {}  # by name of a weight, why its gradient is formed, as steps have shown
        self.remarks: tuple[str, ...] = ()
        self._begin()

    def _begin(self) -> None:
        """Capture the layers of the model as it is."""
        self._structure = ModelStructure(self._model)
        self._weights = self._weights_of_layers()
        refused = self._refusals()
        kept = self._found | refused
        others = {name for name, (_, product) in self._weights.items() if not product}
        partition = partition_parameters(self._model, self._method, kept.keys() | others, False)
        self._capture = partition.capture
        self._units = [unit for unit in partition.units if isinstance(unit, FactorUnit)]
        for unit in self._units:
            unit.watch(WeakMethod(self._arrived))
        parameters = dict(self._model.named_parameters())
        self._excluded = [parameters[name] for name in refused]
        self._remark(partition.reasons | kept)

    def _refusals(self) -> dict[str, str]:
        """Return the trained weights of layers whose gradients the optimizer needs, by name, with the reason."""
        reasons = reasons_against([self._optimizer])
        found = {name: reasons.get(each, "the optimizer does not have it") for name, (each, _) in self._weights.items()}
        return {name: reason for name, reason in found.items() if reason}

    def _weights_of_layers(self) -> dict[str, tuple[nn.Parameter, bool]]:
        """Return the weights by name, and whether their gradients are products of rows; those of tables are not."""
        products: dict[int, bool] = {}
        for layer in capturable_layers(self._model).values():
            family = family_of(layer)
            assert family is not None
            form, weight = family.known_form(layer), id(layer._parameters[family.weight])
            products[weight] = products.get(weight, True) and form is not None and is_product(form)
        named = self._model.named_parameters()
        return {name: (weight, products[id(weight)]) for name, weight in named if id(weight) in products}

    def _remark(self, reasons: Mapping[str, str]) -> None:
        formed = {name: reason for name, reason in reasons.items() if name in self._weights}
        if self._units:
            self.remarks = ("fused steps: yes", *(f"  {name}: no, {reason}" for name, reason in formed.items()))
        else:
            why = "; ".join(sorted(set(formed.values()))) or "the model has no linear layer that is trained"
            self.remarks = (f"fused steps: no, {why}",)

    @property
    def fuses(self) -> bool:
        """Whether there is a layer whose gradient need not be formed."""
        return bool(self._units)

    # Backward

    def before_forward(self) -> None:
        """Follow changes of the model, the optimizer, and the numbers of rows; called before a forward pass."""
        for unit in self._units:
            unit.drop_cleared()
        if not self._structure.same_training():
            self._begin_anew()

    def _arrived(self, unit: Unit) -> None:
        assert isinstance(unit, FactorUnit)
        unit.arrivals += 1
        unit.placeholders.put()
        if unit.is_large:
            rows = unit.rows
            unit.form_gradients()
            self._found[unit.name] = f"its {rows} rows take more memory than its gradient"
        else:
            unit.keep(self._owned)
        if unit.outside:
            self._found[unit.name] = "used outside its layer too"

    # The step

    def collect(self, deferral: Deferral | None = None) -> None:
        """Write the gradients to ``.grad``, but for those that may stay products.

        Args:
            deferral: which those are; takes them.
        """
        if not (self._structure.same_tensors() and self._structure.same_training()):
            self._begin_anew()
        for unit in self._units:
            unit.drop_cleared()
            unit.resolve()
            factor = unit.take()
            if factor is not None:
                self._hand_over(unit, factor, deferral)
        begin_step(self._units)
        released = any(unit.name in self._found for unit in self._units)
        if released or (deferral is not None and any(map(deferral.has, self._excluded))):
            self._begin_anew()  # fewer gradients are captured from now on, or more

    def _hand_over(self, unit: FactorUnit, factor: Factor, deferral: Deferral | None) -> None:
        if deferral is None or not deferral.has(unit.lead) or unit.lead.grad is not None:
            add_gradient(unit.lead, factor.gradient())
        else:
            rows = FactorPayload(factor.deltas, factor.activations)
            product = GradientProduct([rows], [1.0], factor.form.transposed, self._constants)
            deferral.products[unit.lead] = product
        if unit.bias is not None:
            add_gradient(unit.parameters[unit.bias], factor.bias_gradient())

    def put_back(self, products: Mapping[nn.Parameter, GradientProduct]) -> None:
        """Hold gradients again that `collect` has left as products, so that programs find them in ``.grad``."""
        for unit in self._units:
            product = products.get(unit.lead)
            if product is not None:
                form = LINEAR if unit.form is None else unit.form
                deltas, rows = (product.right, product.left) if form.transposed else (product.left, product.right)
                unit.put_back(Factor(rows, deltas, form))

    # Release

    def _begin_anew(self) -> None:
        self.release(discard=False)
        self._begin()

    def release(self, *, discard: bool) -> None:
        """Leave all gradients to autograd from now on.

        Args:
            discard: whether to drop those that are held as factors; otherwise they are written to ``.grad``.
        """
        for unit in self._units:
            unit.leave(discard=discard)
        self._units = []
        self._capture.detach()
