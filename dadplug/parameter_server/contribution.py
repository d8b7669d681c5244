"""Contributions on the wire: a site's gradients as one message, and the gradient of a commit from some of them.

``G = sum over contributions of w_i left_i^T right_i``, with ``w_i = n_i s_i / sum_j n_j s_j`` for n_i samples and the
factor s_i that a late contribution has. Every site computes it from the same bytes in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import DamagedError, MismatchError, NonFiniteError
from ..exchange import codec
from ..exchange.factor_buckets import FactorPayload, finite
from ..exchange.wire import WireFormat, wire_format
from ..fused import GradientProduct
from ..methods import Method, decode, decode_bias, is_product
from ..methods.feedback import ErrorFeedback
from ..options import Options
from ..units.base import Unit
from ..units.factor import FactorUnit
from .gradients import ModelGradients, UnitGradient
from .statistics import CommittedBatchNorms, Packed

Content = dict[str, Any]
"""Decoded contribution: by name of a unit, its rows and its formed gradients, see `ContributionCodec.encode`."""


class Contribution(NamedTuple):
    """Decoded contribution.

    Attributes:
        settings: settings of the optimizer's groups at its site.
        content: its gradients.
        statistics: its statistics of batch normalisation; None where these are not exchanged.
    """

    settings: Any
    content: Content
    statistics: Packed | None


class MergedGradients(NamedTuple):
    """Gradients of a commit.

    Attributes:
        gradients: by name of the unit, the formed gradients of its parameters by name.
        products: the gradients that are not formed, by weight.
    """

    gradients: dict[str, dict[str, Tensor]]
    products: dict[nn.Parameter, GradientProduct]


class ContributionCodec:
    """Encoding of one site's gradients, and decoding of those of all sites in a commit.

    Args:
        gradients: the model's gradients.
        method: the method.
        options: the options.
        norms: batch normalisations with the statistics of all sites; None where these are not exchanged.
    """

    def __init__(
        self, gradients: ModelGradients, method: Method, options: Options, norms: CommittedBatchNorms | None
    ) -> None:
        self._gradients = gradients
        self._norms = norms
        self._method = method
        self._wire_name = options.wire
        self._lost = ErrorFeedback(enabled=True)  # what rounding to int8 takes from formed gradients

    def state_dict(self) -> dict[str, Tensor]:
        """Return what rounding has taken from formed gradients, by name."""
        lost: dict[str, Tensor] = self._lost.state_dict()["errors"]
        return lost

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: the state.
        """
        parameters = {name: each for unit in self._gradients.units for name, each in unit.parameters.items()}
        lost = {
            name: each.reshape(-1)[: parameters[name].numel()] for name, each in state.items()
        }  # once in whole rows
        self._lost.load_state_dict({"reference": 0, "errors": lost})

    def _wire(self, unit: Unit) -> WireFormat:
        return wire_format(self._wire_name, unit.lead.dtype)

    # Encoding

    def encode(self, gradients: Mapping[str, UnitGradient], samples: int, settings: Any) -> bytes:
        """Encode a contribution; state that the method keeps is that of the next one then.

        Args:
            gradients: the gradients by name of the unit.
            samples: samples that they stand for.
            settings: settings of the optimizer's groups.

        Raises:
            NonFiniteError: if a gradient holds NaN or Inf; nothing has changed then.
        """
        statistics = None if self._norms is None else self._norms.pack()
        content: Content = {}
        weight = samples / self._gradients.reference
        try:
            for unit in self._gradients.units:
                if unit.name in gradients:
                    factor, dense = gradients[unit.name]
                    rows = None if factor is None else self._encode_rows(unit, gradients[unit.name])
                    formed = {name: self._encode_dense(unit, name, each, weight) for name, each in dense.items()}
                    content[unit.name] = (rows, formed)
        except NonFiniteError:
            for unit in self._gradients.units:
                self._method.rollback(unit.name)
                for name in unit.parameters:
                    self._lost.rollback(name)
            raise
        for unit in self._gradients.units:
            self._method.commit(unit.name)
            for name in unit.parameters:
                self._lost.commit(name)
        return codec.encode((settings, content, statistics))

    def _encode_rows(self, unit: Unit, gradient: UnitGradient) -> tuple[Tensor | None, ...] | None:
        factor = gradient.factor
        assert isinstance(unit, FactorUnit)
        assert factor is not None
        if not factor.rows and factor.bias is None:
            return None
        try:
            if factor.form.encoded:
                payload = self._method.encode(unit.name, factor, unit.bias is not None)
            else:
                payload = FactorPayload(factor.deltas, factor.activations)
        except FloatingPointError as error:
            raise _not_finite(unit.name) from error
        if not payload.finite():
            raise _not_finite(unit.name)
        wire = self._wire(unit)
        bias = None if payload.bias is None else wire.encode(payload.bias[None])[0]
        right = payload.right if factor.form.table_rows else wire.encode(payload.right)
        return wire.encode(payload.left), right, bias

    def _encode_dense(self, unit: Unit, name: str, gradient: Tensor, weight: float) -> Tensor:
        """Encode a formed gradient times the site's samples over the reference."""
        if not finite(gradient):
            raise _not_finite(name)
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1) * weight
        wire = self._wire(unit)
        if not wire.quantised:
            return wire.encode(flat)
        flat = flat.float()
        lost = self._lost.find(name, flat)
        if lost is not None:
            flat = flat + lost
        encoded = wire.encode_flat(flat)
        torch.sub(flat, wire.decode_flat(encoded, flat.numel()), out=self._lost.prepare(name, flat))
        return encoded

    # Decoding

    def unpack(self, body: bytes | bytearray, site: str) -> Contribution:
        """Return a decoded contribution, checked.

        Args:
            body: what `encode` has returned at its site.
            site: name of the site, for messages.

        Raises:
            MismatchError: if it does not fit this site's model.
        """
        units = {unit.name: unit for unit in self._gradients.units}
        try:
            settings, content, statistics = codec.decode(body)
            if (statistics is None) != (self._norms is None):
                raise ValueError("one of both sites sends no statistics of batch normalisation")
            if self._norms is not None:
                self._norms.check(statistics)
            for name, (rows, formed) in content.items():
                self._check(units[name], rows, formed)
        except (DamagedError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise MismatchError(f"the contribution of {site} does not fit this site's model: {error}") from error
        return Contribution(settings, content, statistics)

    def _check(self, unit: Unit, rows: Any, formed: Any) -> None:
        """Raise ValueError if shapes or types of a unit's parts are not possible."""
        wire = self._wire(unit)
        if rows is not None:
            left, right, bias = rows
            if not isinstance(unit, FactorUnit):
                raise ValueError(f"{unit.name!r} has no factors here")
            out, width = unit.widths
            expected = (len(left), wire.row_size(out))
            if tuple(left.shape) != expected or left.dtype != wire.dtype:
                raise ValueError(f"rows of {unit.name!r} are {left.dtype} of shape {tuple(left.shape)}")
            if unit.form is not None and unit.form.table_rows:
                if right.dtype not in (torch.int32, torch.int64) or len(right) != len(left):
                    raise ValueError(f"row numbers of {unit.name!r} are {right.dtype} of shape {tuple(right.shape)}")
                if right.numel() and not 0 <= int(right.min()) <= int(right.max()) < unit.form.table_rows:
                    raise ValueError(f"row numbers of {unit.name!r} are out of range")
            elif tuple(right.shape) != (len(left), wire.row_size(width)) or right.dtype != wire.dtype:
                raise ValueError(f"rows of {unit.name!r} are {right.dtype} of shape {tuple(right.shape)}")
            sends_bias = unit.bias is not None and self._method.traits.sends_bias
            size = wire.row_size(unit.parameters[unit.bias].numel()) if sends_bias and unit.bias is not None else 0
            if (bias is not None) != sends_bias or (bias is not None and bias.numel() != size):
                raise ValueError(f"the bias of {unit.name!r} does not fit")
        for name, value in formed.items():
            if value.numel() != wire.flat_size(unit.parameters[name].numel()) or value.dtype != wire.dtype:
                raise ValueError(f"the gradient of {name!r} has {value.numel()} elements of {value.dtype}")

    def merge(
        self,
        contents: Sequence[Content],
        samples: Sequence[float],
        scales: Sequence[float],
        apart: Set[nn.Parameter],
    ) -> MergedGradients:
        """Compute the gradient of a commit.

        Args:
            contents: the contributions, in the order of the commit.
            samples: samples of each.
            scales: factor of each.
            apart: weights whose gradients are not formed where they are products.
        """
        total = sum(count * scale for count, scale in zip(samples, scales, strict=True))
        weights = [count * scale / total for count, scale in zip(samples, scales, strict=True)]
        merged = MergedGradients({}, {})
        for unit in self._gradients.units:
            found = [each.get(unit.name, (None, {})) for each in contents]
            rows = [(each, weight) for (each, _), weight in zip(found, weights, strict=True) if each is not None]
            gradients: dict[str, Tensor] = {}
            if rows:
                assert isinstance(unit, FactorUnit)
                assert unit.form is not None
                payloads, shares = self._decode_rows(unit, rows), [weight for _, weight in rows]
                formed = any(unit.name in dense for _, dense in found)
                if unit.lead in apart and not formed and is_product(unit.form):
                    merged.products[unit.lead] = GradientProduct(payloads, shares, unit.form.transposed)
                    if unit.bias is not None:
                        gradients[unit.bias] = decode_bias(payloads, shares, unit.form)
                else:
                    gradients = self._form(unit, payloads, shares)
            for name in unit.parameters:
                parts = [(dense[name], scale) for (_, dense), scale in zip(found, scales, strict=True) if name in dense]
                if parts:
                    dense = self._sum_dense(unit, name, parts).mul_(self._gradients.reference / total)
                    known = gradients.get(name)
                    gradients[name] = dense if known is None else known.to_dense().reshape(-1) + dense
            if gradients:
                merged.gradients[unit.name] = gradients
        return merged

    def _decode_rows(self, unit: FactorUnit, rows: Sequence[tuple[Any, float]]) -> list[FactorPayload]:
        """Return what the sites of a commit have sent of a unit."""
        assert unit.form is not None
        wire, device, dtype = self._wire(unit), unit.lead.device, unit.lead.dtype
        payloads = []
        for (left, right, bias), _ in rows:
            right = right if unit.form.table_rows else wire.decode(right)
            bias = None if bias is None else wire.decode(bias[None])[0]
            payloads.append(FactorPayload(wire.decode(left), right, bias).to(device, dtype))
        return payloads

    def _form(self, unit: FactorUnit, payloads: list[FactorPayload], shares: list[float]) -> dict[str, Tensor]:
        """Return the gradients of a unit's weight and bias by name."""
        assert unit.form is not None
        exact, with_bias = self._method.traits.exact, unit.bias is not None
        gradient, bias = decode(payloads, shares, with_bias, site_by_site=exact, form=unit.form)
        found = {unit.name: gradient}
        if unit.bias is not None and bias is not None:
            found[unit.bias] = bias
        return found

    def _sum_dense(self, unit: Unit, name: str, parts: Sequence[tuple[Tensor, float]]) -> Tensor:
        """Return the sum of formed gradients, each times its factor, in the order of the commit."""
        parameter, wire = unit.parameters[name], self._wire(unit)
        total: Tensor | None = None
        for encoded, scale in parts:
            value = wire.decode_flat(encoded, parameter.numel())
            value = value.to(parameter.device, torch.promote_types(value.dtype, torch.float32))
            value = value * scale if scale != 1.0 else value
            total = value.clone() if total is None else total.add_(value)
        assert total is not None
        return total.to(parameter.dtype)


def _not_finite(name: str) -> NonFiniteError:
    return NonFiniteError(
        f"NaN or Inf in the gradient of {name!r} of this site. Nothing has been sent, and the other sites go on; the "
        "batch is left out if you go on, too"
    )
