"""Base of the methods of gradient agreement: encoding of a layer's factors, and decoding of the gathered ones.

Exact methods are here, too: dSGD, dAD, edAD, and the choice between the first two (dAD and edAD: arXiv:2102.09631,
section 3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ...errors import PolicyError
from ...exchange.factor_buckets import FactorPayload, StackedShares, StackedSlots
from ...exchange.restrictions import check_restricted_rank, check_restrictions
from ...exchange.wire import WireFormat, wire_format
from ...hooks import LINEAR, CapturedLayer, Factor, Form
from ...lowrank import sum_of_products, sum_one_by_one
from ...lowrank.dispatch import NumbaKernels, cpu_kernels
from ...support.registry import Registry
from ...support.schedules import DEFAULTS, Decoding
from .feedback import ErrorFeedback, LossScales


class GradientPath(str, Enum):
    """Name of a path; equal to, printed and hashed as the plain string.

    A method may name paths of its own beside these, for which `dadplug.step.reducer.register_handler` has registered a
    handler.
    """

    ALLREDUCE = "allreduce"
    """Gradients are summed over sites."""
    FACTORS = "factors"
    """Rows of activations and deltas are gathered."""
    ACTIVATIONS = "activations"
    """Activations are gathered; deltas are recomputed from those of the layer that follows in a chain."""
    LOWRANK = "lowrank"
    """Gradients are compressed to low-rank factors, which are gathered."""
    POWERSGD = "powersgd"
    """Gradients are compressed to a low rank that is common to all sites."""
    TOPK = "topk"
    """The largest elements of each gradient are gathered with their indices."""
    MASKED = "masked"
    """Gradients are summed over sites in fixed point, under masks that cancel."""
    FROZEN = "frozen"
    """The parameter is not trained, and nothing is sent."""
    PRIVATE = "private"
    """The parameter stays at its site, with the gradient of this site alone."""

    __str__ = str.__str__
    __repr__ = str.__repr__
    __format__ = str.__format__  # type: ignore[assignment]


@dataclass(frozen=True)
class Quality:
    """Quality of the compression of a layer's gradient at this site.

    Attributes:
        effective_rank: number of components sent.
        residual: relative error in Frobenius norm, as last measured, of what was to be sent: the gradient and what was
            kept of earlier ones.
        kept: number of further components that are kept for the next step; 0 where all is kept in a matrix.
    """

    effective_rank: int
    residual: float
    kept: int = 0


@dataclass(frozen=True)
class Traits:
    """Properties of a method.

    Attributes:
        exact: whether the agreed gradient is that of one process, up to rounding.
        takes_factors: whether it sends factors at all; then an embedding's gradient is sent as the rows that it has.
        chooses_path: whether layers are all-reduced where that is predicted to take less time than their `path`.
        detects_nonfinite: whether `encode` raises FloatingPointError for NaN or Inf, so that no other check is needed.
        keeps_state: whether a step changes anything that the next one uses. The step then ends by `commit` or
            `rollback`.
        shares_state: whether all sites must have the same state; sites that resume get rank 0's.
        sends_bias: whether a bias gradient is sent beside the rows; otherwise it is the sum of the rows of `left`.
        recomputes_deltas: whether deltas along chains of layers are recomputed and not sent, see
            `dadplug.step.planning.chains`.
        reads: the options of single methods that it reads; None if that is not known.
    """

    exact: bool
    takes_factors: bool = True
    chooses_path: bool = False
    detects_nonfinite: bool = False
    keeps_state: bool = False
    shares_state: bool = False
    sends_bias: bool = False
    recomputes_deltas: bool = False
    reads: tuple[str, ...] | None = None


class MethodOptions(Protocol):
    """Options that methods read; `dadplug.options.Options` has them, with their meaning."""

    @property
    def mode(self) -> str: ...

    @property
    def rank(self) -> int | str: ...

    @property
    def largest_rank(self) -> int: ...

    @property
    def iterations(self) -> int: ...

    @property
    def tolerance(self) -> float: ...

    @property
    def warm_start(self) -> bool: ...

    @property
    def density(self) -> float: ...

    @property
    def error_feedback(self) -> bool | None: ...

    @property
    def memory_decay(self) -> float | None: ...

    @property
    def budget(self) -> int | None: ...

    def wire_of(self, path: str, numbers: int = 0) -> str: ...

    @property
    def share_inputs(self) -> bool: ...

    @property
    def merge(self) -> str: ...


_FED = attrgetter("fed_by_data")


class Method:
    """Method of gradient agreement. A new one is a subclass in a file of its own, registered by `register_method`.

    Args:
        options: the options of the reduction.

    Attributes:
        errors: the error memory, where it has one.
        loss_scales: the loss scale that a unit's gradient contains, by name of the unit.
        weight: expected weight of what `encode` is given in the mean over sites, in which memories of earlier gradients
            are kept; set before `encode` is called. 0.0 for a site without weight in the mean.
    """

    name: ClassVar[str]
    """Value of the option ``mode``; `register_method` sets it."""
    traits: ClassVar[Traits]
    """Properties by which the other parts of a step treat the method."""
    max_rank: int | None = None
    """Largest rank of a compressed gradient; None for a method without."""
    largest_rank: int = 1
    """The most that `max_rank` can be set to where an owner merges, who has room for so many."""

    def __init__(self, options: MethodOptions) -> None:
        self.options = options
        self.errors = ErrorFeedback(False)
        self.loss_scales = LossScales()
        self.weight = 1.0
        self.batch: Callable[[], int] = int  # samples of this site in the step; 0 where they are not known
        self.layers: Mapping[str, Sequence[CapturedLayer]] = {}  # by name of the weight

    def is_fed(self, name: str) -> bool:
        """Return whether data are the input of a weight's layer, as far as its passes have shown."""
        return any(map(_FED, self.layers.get(name, ())))

    @property
    def keeps_rows(self) -> bool:
        """Whether further rows are kept of what sites and merges do not send."""
        return False

    @property
    def keeps_errors(self) -> bool:
        """Whether what a step has not sent is kept for later ones, without the loss scale, which has to be known."""
        return self.errors.enabled or wire_format(self.options.wire_of(GradientPath.LOWRANK)).quantised

    def path(self, out: int, width: int) -> str:
        """Choose the path of a layer that has factors: ``"factors"``, ``"lowrank"`` or, by default, ``"allreduce"``.

        On the path ``"factors"`` a layer's rows are encoded in the form that they have; on ``"lowrank"`` always as
        matrices D (rows x out) and A (rows x width), whose product is the gradient.

        Args:
            out: height of the weight as a matrix, its first width: of a fully connected layer that of the output.
            width: width of the weight as a matrix, all its other widths: that of the input.
        """
        return "allreduce"

    def path_of(self, out: int, width: int, dtype: torch.dtype) -> str:
        """Choose the path of a layer whose weight has a type; by default the same for all types, by `path`."""
        return self.path(out, width)

    def gradient_path(self, out: int, width: int) -> str:
        """Choose the path of a weight whose gradient autograd forms; ``"allreduce"`` unless a method has its own.

        Args:
            out: height of the weight as a matrix.
            width: its width.
        """
        return "allreduce"

    def rank_of(self, rank: int, out: int, width: int) -> int:
        """Return how many components of a gradient are sent at most, where the rank of all layers is given.

        Args:
            rank: the rank.
            out: height of the gradient.
            width: its width.
        """
        return min(rank, out, width)

    def rows_sent(self, rows: int, out: int, width: int) -> int:
        """Predict the number of rows that a layer with this many rows of input sends; 0 on the path ``"allreduce"``."""
        return 0

    def encode(self, name: str, factor: Factor, with_bias: bool) -> FactorPayload:
        """Encode a layer's factors as a payload.

        State for the next step is stored by `commit`. A further call in the same step, for rows that arrived late,
        continues from the one before, whose payload is not valid any more.

        Args:
            name: the name of the weight.
            factor: the site's factors.
            with_bias: whether the layer has a bias that is trained.

        Raises:
            FloatingPointError: if the method finds NaN or Inf in the factors.
        """
        raise NotImplementedError(f"mode {self.name!r} has no factor path")

    def encode_table(self, name: str, factor: Factor, wire: WireFormat) -> FactorPayload:
        """Encode rows of a table; by default as they are. As `encode` in all else.

        Args:
            name: the name of the weight.
            factor: the site's factors: deltas, and numbers of rows, each once.
            wire: the format in which they are sent.
        """
        return FactorPayload(factor.deltas, factor.activations)

    def check_rank(self, name: str, rows: int) -> None:
        """Check how many rows would be sent for those of a layer's input, against this site's kit; before `encode`.

        Args:
            name: the name of the weight.
            rows: rows of the layer's input in the step.

        Raises:
            PolicyError: if they are more than the kit allows.
        """
        if getattr(self.options, "privacy", None) is None:
            check_restricted_rank(name, min(self.most_sent(name, rows), rows), rows)

    def check_inputs(self, name: str) -> None:
        """Check, with ``share_inputs=False``, that a layer of which rows are sent is not fed by data; before `encode`.

        Layers that data feed in the first step send none. Data may reach another one in a later step.

        Raises:
            PolicyError: if it is.
        """
        if not self.options.share_inputs and self.is_fed(name):
            raise PolicyError(
                f"share_inputs=False: data have reached the layer of {name!r} for the first time in this step, and "
                "nothing of it has been sent. Pass data through it in the first step, too, so that its gradient is "
                "all-reduced, or choose mode='dsgd'"
            )

    def most_sent(self, name: str, rows: int) -> int:
        """Return how many rows or components are sent of a layer, at most.

        Args:
            name: the name of the weight.
            rows: rows of the layer's input in the step.
        """
        return rows if self.max_rank is None else self.max_rank

    def commit(self, name: str, weight: float | None = None) -> None:
        """Keep what this step has changed in the state of a weight.

        Args:
            name: the name of the weight.
            weight: the weight in the mean that the step has given to what was encoded; None for the expected one.
        """

    def rollback(self, name: str) -> None:
        """Restore the state of a weight as it was before the step, to the bit; also before it is encoded again."""

    def retain(self, names: Container[str]) -> None:
        """Drop what is kept of the gradients of all other weights, which are not in the model any more."""
        self.errors.retain(names)

    def fit_budget(self, widths: Sequence[tuple[int, int]]) -> None:
        """Choose the largest rank for which the layers' low-rank factors take the bytes of the option ``budget``.

        Args:
            widths: height and width, as a matrix, of each weight that is compressed.

        Raises:
            ValueError: if these are too few for a rank of 1.
        """
        budget, wire = self.options.budget, wire_format(self.options.wire_of(GradientPath.LOWRANK))
        if budget is None or not widths:
            return

        def nbytes(rank: int) -> int:
            rows = (min(rank, *each) * sum(map(wire.row_size, each)) for each in widths)
            return wire.itemsize * sum(rows)

        if budget < nbytes(1):
            raise ValueError(
                f"budget={budget} is too small for the layers of the model: a rank of 1 takes {nbytes(1)} bytes"
            )
        self.max_rank = bisect_right(range(1, 1 + max(map(min, widths))), budget, key=nbytes)

    def quality(self) -> dict[str, Quality]:
        """Return the quality of the last step's compression, by name of the weight."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the method keeps between steps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def load_from(self, state: dict[str, Any]) -> None:
        """Restore what does not depend on the site, after `load_state_dict`; called for each state of a checkpoint.

        Args:
            state: what `state_dict` returned at a site that wrote the checkpoint.
        """


def decode(
    shares: Sequence[FactorPayload],
    weights: Sequence[float],
    with_bias: bool,
    *,
    site_by_site: bool = False,
    form: Form = LINEAR,
    constants: Decoding = DEFAULTS.decoding,
) -> tuple[Tensor, Tensor | None]:
    """Compute the agreed gradient of a layer, ``sum over sites of w_s left_s^T right_s`` for fully connected ones.

    Every site computes it from the same values in the same order, so that all get the same bits.

    Args:
        shares: what each site sent, by rank.
        weights: each site's share in the mean.
        with_bias: whether the layer has a bias that is trained.
        site_by_site: adds up one product a site, each rounded as that site would have rounded its own gradient, so
            that two sites with equal batches get the bits of an all-reduce; costs nothing where sites have as many
            rows as a batch. Otherwise the sites' rows are stacked and multiplied at once, which is faster for few.
        form: how rows make a gradient.
        constants: sizes of blocks; the same at all sites, since the last bits depend on them.

    Returns:
        The gradients of the weight, in its shape or as a matrix, and of the bias, of shape (out,), or None.
    """
    if form == LINEAR and not site_by_site and not (with_bias and shares[0].bias is None):
        if isinstance(shares, StackedShares):
            parts, stack = (shares.lefts, shares.rights), (shares.left, shares.right, shares.scaled)
        else:
            parts, stack = ([share.left for share in shares], [share.right for share in shares]), None
        gradient = sum_of_products(*parts, weights, constants, stack)
    else:
        rows = [FactorPayload(share.left * weight, share.right) for share, weight in zip(shares, weights, strict=True)]
        rows = [share for share in rows if share.rows] or rows[:1]
        if form == LINEAR:
            gradient = sum_one_by_one([share.left for share in rows], [share.right for share in rows], constants)
        else:
            gradient = form.gradient(rows[0].left, rows[0].right)
            for share in rows[1:]:
                gradient = form.add_to(gradient, share.left, share.right)
        if with_bias and shares[0].bias is None:
            return gradient, _summed_rows(rows, form)
    return gradient, decode_bias(shares, weights, form) if with_bias else None


def decode_bias(shares: Sequence[FactorPayload], weights: Sequence[float], form: Form = LINEAR) -> Tensor:
    """Compute the agreed gradient of a layer's bias, of shape (out,), as `decode` does.

    Args:
        shares: what each site sent, by rank.
        weights: each site's share in the mean.
        form: how rows make a gradient.
    """
    if shares[0].bias is None:
        rows = [FactorPayload(share.left * weight, share.right) for share, weight in zip(shares, weights, strict=True)]
        return _summed_rows([share for share in rows if share.rows] or rows[:1], form)
    bias = torch.zeros_like(shares[0].bias)
    for share, weight in zip(shares, weights, strict=True):
        assert share.bias is not None
        bias.add_(share.bias, alpha=weight)
    return bias


def _summed_rows(rows: Sequence[FactorPayload], form: Form) -> Tensor:
    sums = [form.bias_gradient(share.left) for share in rows]
    return sum(sums[1:], sums[0])


def is_product(form: Form) -> bool:
    """Return whether a gradient of this form is the product of the two blocks of rows, or its transpose."""
    return form == LINEAR or form.transposed


METHODS: Registry[str, type[Method]] = Registry("mode", exact=True)
"""Methods by the value of the option ``mode``."""


def register_method(name: str) -> Callable[[type[Method]], type[Method]]:
    """Register a method under the value of the option ``mode`` that names it; a class decorator.

    Raises:
        ValueError: if a method of dadplug has the name, which a policy may allow for what that one sends.
    """

    def decorate(method: type[Method]) -> type[Method]:
        own = f"{__package__}."
        if name in METHODS.names and not method.__module__.startswith(own) and METHODS[name].__module__.startswith(own):
            raise ValueError(f"mode {name!r} is one of dadplug, by which policies allow it: choose another name")
        method.name = name
        return METHODS.register(name)(method)

    return decorate


def on_registration(listener: Callable[[str], object]) -> None:
    """Call a function with the name of every method that is registered from now on."""
    METHODS.on_register(listener)


def method_names() -> tuple[str, ...]:
    """Return the valid values of the option ``mode``."""
    return METHODS.names


def check_allowed(options: MethodOptions) -> None:
    """Check the options of a reduction against the restrictions of this site's kit, if it is connected to a hub.

    Args:
        options: the options.

    Raises:
        PolicyError: if one of them is not allowed.
    """
    check_restrictions(options, sends_factors=METHODS[options.mode].traits.takes_factors)


def make_method(options: MethodOptions) -> Method:
    """Make the method that ``options.mode`` names."""
    return METHODS[options.mode](options)


_LAYERS = ((24, 20, 16), (16, 512, 512))  # rows, height and width: rankdad forms the gradient of the first


def warm_up(options: MethodOptions, dtype: torch.dtype) -> None:
    """Encode and decode small layers, so that kernels are loaded or compiled before other sites wait for this one.

    Args:
        options: options of the reduction.
        dtype: type of the gradients.
    """
    method = make_method(options)
    if not (method.traits.takes_factors and dtype.is_floating_point):
        return
    generator, flat = torch.Generator().manual_seed(0), torch.zeros(15, dtype=torch.int8)
    if isinstance(cpu_kernels(), NumbaKernels):
        views = FactorPayload(flat[:5].view(1, 5), flat[5:10].view(1, 5), flat[10:])
        StackedSlots({0: [views]}, [flat]).decode([flat])
    for number, (rows, out, width) in enumerate(_LAYERS):
        activations, deltas = (torch.randn(rows, n, generator=generator).to(dtype) for n in (width, out))
        for _ in range(2):  # the second call begins from the basis of the first
            payload = method.encode(f"warm-up {number}", Factor(activations, deltas), True)
            decode([payload, payload], [0.5, 0.5], True, site_by_site=method.traits.exact)
            method.commit(f"warm-up {number}")


@register_method("dad")
class DAD(Method):
    """Gather of N (m + n) values a layer, fewer than dSGD's m n if N < m n / (m + n)."""

    traits = Traits(exact=True, reads=())

    def path(self, out: int, width: int) -> str:
        return "factors"

    def rows_sent(self, rows: int, out: int, width: int) -> int:
        return rows

    def encode(self, name: str, factor: Factor, with_bias: bool) -> FactorPayload:
        return FactorPayload(factor.deltas, factor.activations)


@register_method("auto")
class Auto(DAD):
    """`DAD`, or an all-reduce, as `dadplug.step.planning.planner.merge_reports` chooses by the link and the rows."""

    traits = Traits(exact=True, chooses_path=True, reads=())


@register_method("dsgd")
class DSGD(Method):
    """All-reduce of m n values a layer, in buckets that are summed during the backward pass."""

    traits = Traits(exact=True, takes_factors=False, reads=())


@register_method("edad")
class EDAD(DAD):
    """Gather of N n values a layer in a chain, and of N (m + n) for the last one and for layers outside of chains."""

    traits = Traits(exact=True, recomputes_deltas=True, reads=())
