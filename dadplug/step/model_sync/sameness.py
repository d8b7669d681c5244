"""Comparison of what has to be the same at all sites, or must not be, and making the replicas of a model equal.

Each step header carries two digests: of the optimizers' settings in the last step, and, in the first step, of the
site's first batch, or, every `compare_every` steps, of its weights. Only where digests differ are the values gathered,
so that the error can name them.

Lookups in embeddings with ``max_norm`` change their rows: all sites have to change the same ones.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import MismatchError, escaped
from ...exchange import Transport
from ...exchange.codec import SITES_VERSION
from ...exchange.fields import checked
from ...exchange.restrictions import STATES, declared
from ...hooks import CallOverride, eager
from ...support.logs import get_logger
from ...support.schedules import version_of
from .private import is_of_site
from .structure import is_managed

_ROUNDS = 8  # of renormalisation; two are enough, but with NaN there is always a change


def tables_with_max_norm(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings with ``max_norm``, whose lookups change their rows."""
    tables = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return [table for table in tables if table.max_norm is not None]


@torch.no_grad()
def renormalise(table: nn.Embedding | nn.EmbeddingBag, rows: Tensor | None = None) -> None:
    """Renormalise rows of a table, as a lookup does, since sites have looked up different rows.

    This is repeated until nothing changes, so that a row that has been looked up twice has the bits of one that has
    not.

    Args:
        table: an embedding with ``max_norm``.
        rows: numbers of the rows; all where None.
    """
    assert table.max_norm is not None
    weight = table.weight
    chosen = torch.arange(table.num_embeddings, device=weight.device) if rows is None else rows.to(weight.device)
    for _ in range(_ROUNDS):
        before = weight[chosen]
        torch.embedding_renorm_(weight, chosen, table.max_norm, table.norm_type)
        if torch.equal(before, weight[chosen]):
            break


class LookedUpRows:
    """Rows of tables with ``max_norm`` that this site has looked up since the last exchange.

    Args:
        model: the model.
        elastic: whether sites may leave: all rows count as looked up then, which needs no message.
    """

    def __init__(self, model: nn.Module, elastic: bool) -> None:
        self._elastic = elastic
        self._tables = tables_with_max_norm(model)
        self._lookups = [] if elastic else [_Lookups(table) for table in self._tables]

    def renormalise(self, transport: Transport) -> None:
        """Renormalise what any site has looked up, at all sites; all of them must call it."""
        if self._elastic or not self._tables:
            for table in self._tables:
                renormalise(table)
            return
        own = [lookups.take() for lookups in self._lookups]
        every = checked(transport.gather_present(own), list[Tensor], "list of rows", transport).values()
        if {len(site) for site in every} != {len(own)}:
            raise MismatchError("the sites look up rows of different numbers of tables: do all run the same model?")
        for number, table in enumerate(self._tables):
            renormalise(table, torch.cat([site[number] for site in every]).unique())

    def detach(self) -> None:
        """Record lookups no longer."""
        for lookups in self._lookups:
            lookups.override.restore()


class _Lookups:
    """Record of the rows of a table that are looked up.

    Args:
        table: the table.
    """

    def __init__(self, table: nn.Embedding | nn.EmbeddingBag) -> None:
        self._seen = torch.zeros(table.num_embeddings, dtype=torch.bool)
        self.override = CallOverride(table, self._around)

    def take(self) -> Tensor:
        """Return the numbers of the rows, and forget them."""
        numbers = self._seen.nonzero().flatten()
        self._seen.zero_()
        return numbers

    @eager
    def _around(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        numbers = args[0] if args else kwargs["input"]
        self._seen[numbers.detach().flatten().cpu().long()] = True
        return call(*args, **kwargs)


_STATES, _FURTHER_BYTES = 16, 1 << 28  # bound of a state: times the model's tensors, and besides
_GROUP_BYTES = 1 << 25  # that are flattened at once
Item = TypeVar("Item")


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""Methods that return the dense tensors in which those of a layout hold their values; others stay as they are."""


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return by name the dense tensors in whose memory a model has its parameters and buffers."""
    found: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if _is_dense(tensor):
            found[name] = tensor
        elif tensor.is_quantized:  # its scales are part of its name, so that they are compared
            plain = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())
            found[f"{name} ({str(tensor).partition('quantization_scheme=')[2]}"] = plain
        else:
            parts = (
                tensor.unbind() if tensor.is_nested else [getattr(tensor, of)() for of in _PARTS.get(tensor.layout, ())]
            )
            found |= {f"{name}, {str(tensor.layout)[6:]} part {n}": part for n, part in enumerate(parts)}
    return found


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def dense_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return by name the buffers that sites agree on in training; sparse and quantized ones stay as at the start."""
    return {name: each for name, each in model.named_buffers() if _is_dense(each) and each.numel()}


def write(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor, once into memory that an expanded one has in several places."""
    once = tuple(slice(0, None if stride else 1) for stride in tensor.stride())
    tensor[once].copy_(values[once])


def describe(model: nn.Module, settings: dict[str, Any]) -> dict[str, str]:
    """Return what has to be the same at all sites: messages, settings, and types and shapes of the model's tensors."""
    own = {"version of dadplug's messages": str(SITES_VERSION)}
    own |= {f"option {name}": repr(value) for name, value in settings.items()}
    for name, tensor in _tensors(model).items():
        trained = ", trained" if tensor.requires_grad else ""
        own[f"tensor {name}"] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{trained}"
    return own


@torch.no_grad()
def load_tensors(
    own: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    sender: str = "another site",
    frozen: Mapping[str, int] | None = None,
) -> None:
    """Replace the values of a model's parameters and buffers by those of another site.

    Args:
        own: the parameters and buffers, by name.
        tensors: the values.
        sender: the site that has sent them.
        frozen: digests of frozen parameters that this site has to have already, by name.

    Raises:
        MismatchError: if they have other names, shapes or types, or frozen ones other values; nothing has changed then.
    """
    own, frozen = dict(own), frozen or {}
    for name in [name for name in frozen if name in own]:
        if fingerprint(tensor := own.pop(name)) != frozen[name]:
            raise MismatchError(
                f"the frozen parameter {name!r} {list(tensor.shape)} is not that of the training that this site joins, "
                "and is not sent: load the weights with which the other sites have started"
            )
    for name, tensor in own.items():
        given = tensors.get(name)
        if given is None or (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
            what = f"{name!r} of shape {list(tensor.shape)} and {tensor.dtype}"
            raise MismatchError(f"{sender} has sent no {what} of its model")
    for name, tensor in own.items():
        write(tensor.detach(), tensors[name])


def take_over(reduction: Any, source: int, own: Mapping[str, Tensor]) -> None:
    """Replace tensors at all sites by those of one site; all sites must call it.

    Args:
        reduction: the reduction.
        source: rank of the site.
        own: the tensors of this site, by name.

    Raises:
        MismatchError: if the site sends others.
    """
    given = dict(own) if reduction.site_rank == source else None
    with declared(STATES):
        every = reduction.gather_objects(given, dict[str, Tensor] | None, "state")
    load_tensors(own, every[source] or {}, reduction.sites[source])


def largest_state(model: nn.Module) -> int:
    """Return a bound in bytes of the state of a training: the model, and several times that of optimizer and method."""
    tensors = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(model).values())
    return _STATES * tensors + _FURTHER_BYTES


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name, detached."""
    return {name: tensor.detach() for name, tensor in _tensors(model).items()}


def check_alike(description: dict[str, str], transport: Transport, remedy: str = "") -> None:
    """Compare the sites' models and settings.

    Args:
        description: what `describe` returns at this site.
        transport: the transport.
        remedy: end of the message.

    Raises:
        MismatchError: on every site, naming the first difference.
    """
    for first_site, first, site, other in _pairs(description, dict[str, str], transport):
        compare(first, other, first_site, site, remedy)


def _pairs(
    own: Item, kind: Any, transport: Transport, digests: Sequence[int] = ()
) -> Iterator[tuple[str, Item, str, Item]]:
    """Gather an object from each site; yield name and object of the first site, and of each other one.

    Args:
        own: this site's object.
        kind: its type.
        transport: the transport.
        digests: of each site; 0 for sites that are left out. All sites are compared where there are none.
    """
    every = checked(transport.gather_present(own), kind, "description", transport)
    (lowest, first), *others = [(rank, each) for rank, each in every.items() if not digests or digests[rank]]
    for rank, other in others:
        yield transport.sites[lowest], first, transport.sites[rank], other


def _differ(digests: Sequence[int]) -> bool:
    return len({digest for digest in digests if digest}) > 1


def compare(first: dict[str, str], second: dict[str, str], first_site: str, second_site: str, remedy: str = "") -> None:
    """Compare two results of `describe`.

    Args:
        first: that of one site.
        second: that of another.
        first_site: name of the one.
        second_site: name of the other.
        remedy: end of the message.

    Raises:
        MismatchError: naming the first difference.
    """
    for here, there in zip(first, second):
        if here != there and first.keys() == second.keys():
            raise MismatchError(
                f"configuration differs between sites: where {first_site} has {here}, {second_site} has {there}. "
                "Define layers and parameters in the same order at all sites"
            )
    for what in [*first, *second]:
        here, there = first.get(what, "absent"), second.get(what, "absent")
        if here != there:
            raise MismatchError(
                f"configuration differs between sites: {what} is {here} at {first_site} and {there} at {second_site}"
                f"{remedy}"
            )


def raise_problems(problem: str, transport: Transport) -> None:
    """Raise ValueError on all sites if the arguments of one are not valid.

    Args:
        problem: what is wrong at this site; empty if nothing is.
        transport: the transport, closed before an error.
    """
    every = transport.gather_present(problem)
    for rank, found in checked(every, str | None, "problem", transport).items():
        if found:
            text = problem or f"{transport.sites[rank]}: {escaped(found)}"
            transport.close()
            raise ValueError(text)


def check_values(model: nn.Module, names: Collection[str], transport: Transport) -> None:
    """Compare the values of parameters that have been added to the model.

    Args:
        model: the model.
        names: names of the parameters, the same on all sites.
        transport: the transport.

    Raises:
        MismatchError: on every site, if names or values differ; nothing has been changed then.
    """
    own = {name: fingerprint(each) for name, each in model.named_parameters() if name in names}
    for first_site, first, site, other in _pairs(own, dict[str, int], transport):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise MismatchError(
                    f"parameter {name!r} has been added to the model and is not the same at {first_site} and {site}: "
                    "give it the same values on all sites before training goes on, by the same seed or by "
                    "reduction.broadcast_model()"
                )


@torch.no_grad()
def broadcast_model(model: nn.Module, transport: Transport) -> dict[str, int]:
    """Replace every site's parameters and buffers by those of rank 0.

    What is equal at all sites already, as by the same seed, is not sent: on a slow link that takes long. Frozen
    parameters are compared one by one, others in groups.

    Returns:
        Digests by name of the frozen parameters that all sites have had by themselves.
    """
    compares = transport.device.type == "cpu" and transport.world_size > 1  # between GPUs, sending is faster
    frozen = frozen_digests(model) if compares or transport.rounds.elastic else {}
    if frozen and compares:
        others = checked(transport.gather_present(frozen), dict[str, int], "list of digests", transport).values()
        frozen = {name: digest for name, digest in frozen.items() if {each.get(name) for each in others} == {digest}}
    rest = [tensor for name, tensor in _tensors(model).items() if name not in frozen]
    every: list[list[int]] = []
    if compares:
        own = [fingerprint(flat) for flat, _ in flattened(rest)]
        every = [*checked(transport.gather_present(own), list[int], "list of digests", transport).values()]
        if {len(digests) for digests in every} != {len(own)}:
            raise MismatchError("the sites' models have tensors of different types: do all run the same model?")
    for place, (flat, tensors) in enumerate(flattened(rest)):
        if not every or len({digests[place] for digests in every}) > 1:
            _broadcast(flat, tensors, transport)
    return frozen


def frozen_digests(model: nn.Module) -> dict[str, int]:
    """Return by name the digests of a model's parameters that are not trained."""
    named = model.named_parameters()
    return {name: fingerprint(each) for name, each in named if not each.requires_grad and _is_dense(each)}


def broadcast_buffers(model: nn.Module, transport: Transport) -> None:
    """Replace every site's buffers by those of rank 0, also between a forward pass and its backward pass.

    Layers save their running statistics for backward, which does not read them in training: by way of ``data`` autograd
    does not take the change for an error.
    """
    for flat, tensors in flattened([buffer.data for buffer in dense_buffers(model).values()]):
        _broadcast(flat, tensors, transport)


def _broadcast(flat: Tensor, tensors: Sequence[Tensor], transport: Transport) -> None:
    transport.broadcast(flat.view(torch.uint8))  # backends know few types
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        write(tensor, part.view(tensor.shape))


def first_difference(model: nn.Module, transport: Transport) -> str | None:
    """Compare the sites' parameters bit by bit.

    Returns:
        The name of the first parameter that differs between sites; None if the replicas are equal.
    """
    own = {name: fingerprint(parameter) for name, parameter in model.named_parameters()}
    every = checked(transport.gather_present(own), dict[str, int], "list of digests", transport).values()
    return next((name for name in own if len({each.get(name) for each in every}) > 1), None)


def fingerprint(tensor: Tensor) -> int:
    """Return a digest of all bits of a tensor, and of their places; `_bits` is faster, and does not see all swaps."""
    return _digest_of(as_bytes(tensor.cpu()).numpy().data) if tensor.numel() else 0


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor's elements, flattened."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def state_digest(model: nn.Module) -> int:
    """Return a digest of all bits of a model's parameters and buffers, and of its plain settings."""
    settings = (
        (id(module), *((name, value) for name, value in vars(module).items() if type(value) in (bool, int, float, str)))
        for module in model.modules()
    )
    return hash((*settings, *((name, id(each), _bits(each)) for name, each in _tensors(model).items() if each.numel())))


def flattened(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Group tensors by type and device; yield each group, flattened into one tensor and as the tensors.

    A group ends before it takes more than 32 MB, unless by one tensor: a copy of the whole model would double it.
    """
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in map(Tensor.detach, tensors):
        kind = tensor.dtype, tensor.device
        group, nbytes = groups.get(kind, ([], 0))
        if group and nbytes + tensor.nbytes > _GROUP_BYTES:
            yield _flat(group), group
            group, nbytes = [], 0
        group.append(tensor)
        groups[kind] = group, nbytes + tensor.nbytes
    for group, _ in groups.values():
        yield _flat(group), group


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


_log = get_logger(__name__)
_ROUNDING = 64.0  # differences of weights, in units of rounding, that optimizers of two processors may make in a step
_COLUMNS = 64  # sums of a tensor's bits
_WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes of an element


_OF_MACHINES = {"params", "foreach", "fused", "capturable", "differentiable"}  # groups' entries that change no result


def environment() -> dict[str, str]:
    """Return what has to be the same at all sites beside model and options: versions, and the kernels in use."""
    from ...lowrank import portable
    from ...lowrank.dispatch import cpu_kernels

    return {
        "version of torch": torch.__version__.partition("+")[0],
        # Of the code that runs. Metadata of a checkout are those of its installation, however old.
        "version of dadplug": sys.modules[__name__.partition(".")[0]].__version__,
        "version of numba": version_of("numba") or "unknown",
        "kernels": "torch" if cpu_kernels() is portable else "numba",
    }


def described(may_differ: Collection[str]) -> dict[str, str]:
    """Return `environment` without what may differ between sites."""
    ignored = {name for each in may_differ for name in (each, f"version of {each}")}
    return {name: value for name, value in environment().items() if name not in ignored}


class OptimizerSettings:
    """Settings of the optimizers that have stepped this site's parameters.

    Args:
        ignored: names of settings that may differ between sites, such as ``"lr"``, or ``"optimizer"`` for all.
    """

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self._ignored = frozenset(ignored)
        self._skipped = self._ignored | _OF_MACHINES
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[Any], dict[str, str]]] = (
            weakref.WeakKeyDictionary()
        )
        self._found: list[dict[str, str]] = []  # of the optimizers that have made a step since the last `take`
        self._last: list[dict[str, str]] = []
        self._digest = 0

    def record(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the settings with which an optimizer makes a step."""
        if "optimizer" in self._ignored:
            return
        groups = [
            [
                (name, value.tolist() if isinstance(value, Tensor) else value)
                for name, value in group.items()
                if name not in self._skipped and not (isinstance(value, Tensor) and value.is_cuda)
            ]
            for group in optimizer.param_groups
            if not is_of_site(group)
        ]
        before, settings = self._known.get(optimizer, (None, {}))
        if groups != before:  # their description takes longer than a comparison
            settings = {} if "class" in self._ignored else {"class": type(optimizer).__name__}
            for number, group in enumerate(groups):
                for name, value in group:
                    if isinstance(value, (bool, int, float, str, tuple, list, type(None))):
                        settings[f"{name} of group {number}"] = repr(value)
            self._known[optimizer] = groups, settings
        if all(settings is not each for each in self._found):
            self._found.append(settings)

    def take(self) -> int:
        """Return a digest of what has been recorded since the last call; 0 for nothing."""
        found, self._found = self._found, []
        if not (len(found) == len(self._last) and all(a is b for a, b in zip(found, self._last, strict=True))):
            self._last = found
            self._digest = _digest_of(repr(self.described()).encode()) if found else 0
        return self._digest

    def described(self) -> dict[str, str]:
        """Return the settings that `take` has taken, by name."""
        return {
            f"{name} of optimizer {number}": value
            for number, settings in enumerate(self._last)
            for name, value in settings.items()
        }

    def compare(self, digests: Sequence[int], step: int, transport: Transport) -> None:
        """Compare the sites' settings.

        Args:
            digests: what `take` has returned at each site; 0 for sites that cannot be compared.
            step: number of the step.
            transport: the transport.

        Raises:
            MismatchError: on all sites, naming the first setting that differs and its values.
        """
        if _differ(digests):
            remedy = f", before step {step}. If intended, name it at all sites, such as may_differ=('lr',)"
            for first_site, first, site, other in _pairs(self.described(), dict[str, str], transport, digests):
                compare(first, other, first_site, site, remedy)


class Weights:
    """Comparison of the replicas' weights, by digests of their bits, and by sums where these differ.

    Sites with different processors may have weights that differ by rounding; that is no error.

    Args:
        model: the model.
        every: steps between comparisons; 0 for none.

    Attributes:
        last: digest of the last comparison; 0 for none.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self._model = model
        self._every = every
        self.last = 0

    def last_digest(self, step: int) -> int:
        """Return the digest of the last step in which one was due, which may be this one; 0 for none.

        So a site that was late in that step is compared when it takes part again.
        """
        if self._every and step > 0 and step % self._every == 0:
            self.last = self.digest()
        return self.last

    @torch.no_grad()
    def digest(self) -> int:
        """Return a digest of the weights' bits, not 0."""
        total = 1
        for number, (_, parameter) in enumerate(self._parameters()):
            total = (total * 31 + _bits(parameter) * (2 * number + 1)) % (1 << 62)
        return total or 1

    def compare(self, digests: Sequence[int], step: int, transport: Transport) -> None:
        """Compare the sites' weights.

        Args:
            digests: of each site; 0 for sites that cannot be compared.
            step: number of the step.
            transport: the transport.

        Raises:
            MismatchError: on all sites, naming the first tensor that differs by more than rounding.
        """
        if not _differ(digests):
            return
        self.last = 0  # until the next comparison
        pairs = list(_pairs(self._sums(), dict[str, list[float]], transport, digests))
        for name, parameter in self._parameters():
            limit = _ROUNDING * torch.finfo(parameter.dtype).eps * (step + 1) ** 0.5
            for first_site, first, site, other in pairs:
                scale = max(first[name][-1], other[name][-1], 1e-300)
                off = max(abs(a - b) for a, b in zip(first[name], other[name], strict=True)) / scale
                if not off <= limit:  # NaN, too
                    raise MismatchError(
                        f"the replicas differ before step {step}: {name!r} is the first parameter that is not the same "
                        f"at {first_site} and {site}, by {off:.1e} of its size. It was changed at one site, or "
                        "optimizers differ. reduction.broadcast_model() at all sites makes the replicas equal; "
                        "compare_every=0 switches the comparison off"
                    )

    @torch.no_grad()
    def _sums(self) -> dict[str, list[float]]:
        """Return by name the sum of each parameter's elements, a weighted sum, and that of their magnitudes."""
        found = {}
        for name, parameter in self._parameters():
            values = parameter.detach().reshape(-1).double()
            places = torch.linspace(0.5, 1.5, len(values), dtype=torch.float64, device=values.device)
            sums = torch.stack([values.sum(), values.dot(places), values.abs().sum()])
            found[name] = sums.tolist()
        return found

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        named = self._model.named_parameters()
        left_out = {id(table.weight) for table in tables_with_max_norm(self._model)}  # equal after the exchange only
        return [
            (name, each)
            for name, each in named
            if each.is_floating_point() and not is_managed(each) and id(each) not in left_out
        ]


class FirstBatch:
    """Digest of the tensors of a site's first forward pass, to warn where two sites train on the same data.

    Attributes:
        samples: samples of the first pass in which they are known; 0 before.
    """

    def __init__(self) -> None:
        self._digest: int | None = None
        self.samples = 0

    def look(self, inputs: Sequence[Tensor]) -> None:
        """Take a digest of the inputs of a forward pass, unless there is one."""
        if self._digest is not None:
            return
        plain = [each.detach() for each in inputs if each.layout == torch.strided and each.numel() > 1]
        # Those of one value only do not tell batches apart, such as a mask, or ones in an example.
        tells = any(bool((each != each.reshape(-1)[0]).any()) for each in plain)
        described = repr([(tuple(each.shape), str(each.dtype), _bits(each)) for each in plain])
        self._digest = _digest_of(described.encode()) if tells else 0

    def take(self) -> int:
        """Return the digest, once; 0 without an input that tells batches apart."""
        digest, self._digest = self._digest or 0, 0
        return digest

    def compare(self, digests: Sequence[int], transport: Transport) -> None:
        """Warn if two sites have the same digest.

        Args:
            digests: of each site; 0 for sites that cannot be compared.
            transport: the transport.
        """
        for rank, digest in enumerate(digests):
            first = digests.index(digest)
            if digest and first < rank:
                _log.warning(
                    "%s and %s have the same first batch, to the bit: do both train on the same data? Give each site "
                    "rows of its own, as by torch.utils.data.DistributedSampler",
                    transport.sites[first],
                    transport.sites[rank],
                )
                return


def _bits(tensor: Tensor) -> int:
    """Return a digest of a tensor's bits: of sums of whole numbers, by place in blocks of 512 bytes.

    It takes as long as reading the tensor once; a hash of all bytes takes ten times longer.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.is_cpu:
        real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        whole = real.view(_WHOLE[real.element_size()])
        blocks = len(whole) // _COLUMNS * _COLUMNS
        sums = whole[:blocks].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
        return _digest_of(repr((sums.tolist(), whole[blocks:].tolist())).encode())
    data = flat.view(torch.uint8).numpy()
    blocks = len(data) // (8 * _COLUMNS) * 8 * _COLUMNS
    columns = data[:blocks].view(np.int64).reshape(-1, _COLUMNS).sum(0)
    return _digest_of(columns.tobytes() + data[blocks:].tobytes())


def _digest_of(content: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "little") or 1
