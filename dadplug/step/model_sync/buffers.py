"""Means over sites of a model's buffers, such as running statistics: of reductions, local steps, parameter servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import DamagedError, MismatchError
from ...exchange import Transport, codec
from ...exchange.fields import COUNT, checked
from .sameness import as_bytes, dense_buffers, flattened, write

if TYPE_CHECKING:
    from ...exchange.status import PeerNames


def agreed_value(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return what sites agree on: of real and complex numbers the weighted mean, of counters the maximum.

    Counters are single whole numbers. Other integers, truth values and floats of 8 bits are those of the first site. A
    site without a share does not count, and what is equal at all others stays as it is, such as infinity.

    Args:
        values: the values of the sites, in an order that is the same at all of them.
        shares: share in the mean of each site.
    """
    counted = [(value, share) for value, share in zip(values, shares, strict=True) if share]
    first = counted[0][0]
    if first.is_complex():
        return torch.view_as_complex(agreed_value([torch.view_as_real(value) for value in values], shares))
    if not first.is_floating_point() or first.element_size() == 1:
        return first if first.dim() or first.element_size() == 1 else max((value for value, _ in counted), key=int)
    mean, equal = torch.zeros_like(first), torch.ones_like(first, dtype=torch.bool)
    for value, share in counted:
        mean.add_(value, alpha=share)
        equal &= value == first
    return torch.where(equal, first, mean)


def write_agreed(tensors: Sequence[Tensor], flats: Sequence[Tensor], shares: Sequence[float]) -> None:
    """Replace tensors by what sites agree on.

    Args:
        tensors: this site's tensors, of one type.
        flats: the bytes of the tensors of each site, flattened.
        shares: share of each site.
    """
    rows = (flat.view(tensors[0].dtype).split([tensor.numel() for tensor in tensors]) for flat in flats)
    for tensor, *values in zip(tensors, *rows, strict=True):
        write(tensor, agreed_value([value.view(tensor.shape) for value in values], shares))


@torch.no_grad()
def average_tensors(buffers: Sequence[Tensor], transport: Transport, shares: Mapping[int, float]) -> None:
    """Replace tensors by what the sites agree on, see `agreed_value`.

    Args:
        buffers: the tensors, in the same order on all sites.
        transport: the transport.
        shares: share in the mean of each site that takes part, by rank, the same on all sites.
    """
    for flat, tensors in flattened(buffers):
        gather = transport.gather([flat.nbytes] * transport.world_size, torch.uint8, once=True)
        gather.payload.copy_(flat.view(torch.uint8))
        gather.launch()
        transport.rounds.close()
        payloads = gather.wait()
        present = [rank for rank in shares if rank not in transport.rounds.absent]
        left = 1.0 if len(present) == len(shares) else sum(shares[rank] for rank in present)
        weights = [shares[rank] / left if left else 1 / len(present) for rank in present]
        write_agreed(tensors, [payloads[rank] for rank in present], weights)


def average_buffers(model: nn.Module, transport: Transport, weight: float) -> None:
    """Replace every site's buffers by what the sites agree on, see `agreed_value`.

    Args:
        model: the model.
        transport: the transport.
        weight: this site's weight; weights need not sum to one.
    """
    buffers = [*dense_buffers(model).values()]
    if transport.world_size == 1 or not buffers:
        return
    weights = checked(transport.gather_present(weight), float, "weight", transport, lambda each: [each])
    total, equal = sum(weights.values()), 1 / len(weights)
    average_tensors(buffers, transport, {rank: each / total if total else equal for rank, each in weights.items()})


# Buffers in messages, as of parameter servers


def pack_buffers(model: nn.Module, samples: int) -> bytes:
    """Return a model's buffers as bytes, for `average_packed` of all sites.

    Args:
        model: the model.
        samples: samples that this site has trained on since the last mean: its weight.
    """
    return codec.encode((samples, {name: buffer.detach() for name, buffer in dense_buffers(model).items()}))


@torch.no_grad()
def average_packed(model: nn.Module, packed: Mapping[int, bytes | bytearray], sites: PeerNames) -> None:
    """Replace buffers by what the sites agree on, see `agreed_value`.

    Args:
        model: the model.
        packed: results of `pack_buffers`, by rank in ascending order.
        sites: the sites by name.

    Raises:
        MismatchError: if those of a site do not fit this model.
    """
    own = dense_buffers(model)
    if not own:
        return
    layout = {name: (each.shape, each.dtype) for name, each in own.items()}
    every = []
    for rank, body in packed.items():
        try:
            samples, buffers = codec.decode(body)
            if {name: (each.shape, each.dtype) for name, each in buffers.items()} != layout:
                raise ValueError("names, shapes or types differ")
            if not 0 <= float(samples) <= COUNT:
                raise ValueError(f"they are weighted by {samples}")
            every.append((float(samples), buffers))
        except (DamagedError, ValueError, TypeError, AttributeError) as error:
            raise MismatchError(f"the buffers of {sites[rank]} do not fit this site's model: {error}") from error
    total = sum(samples for samples, _ in every)
    shares = [samples / total if total else 1 / len(every) for samples, _ in every]
    for name, buffer in own.items():
        write(buffer, agreed_value([buffers[name].to(buffer.device) for _, buffers in every], shares))


class MovingBuffers:
    """Buffers that have changed at some site since the start, for agreements at which few buffers change.

    Args:
        model: the model.

    Attributes:
        names: their names, the same on all sites.
        agreed: the agreed values of all buffers, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.load([])

    def load(self, names: Iterable[str]) -> None:
        """Take the model's present buffers as the agreed ones.

        Args:
            names: names of the buffers that have changed so far.
        """
        self.names = list(names)
        self.agreed = {name: buffer.detach().clone() for name, buffer in dense_buffers(self._model).items()}

    def changed(self) -> list[str]:
        """List buffers that have changed at this site, and are not among the known ones.

        Values are compared: torch does not count its changes of running statistics as those of a tensor's version.
        """
        return [
            name
            for name, buffer in dense_buffers(self._model).items()
            if name not in self.names
            and not (name in self.agreed and torch.equal(as_bytes(buffer), as_bytes(self.agreed[name])))
        ]

    def announce(self, transport: Transport, shares: Mapping[int, float] | None = None) -> None:
        """Exchange the names of buffers that have changed; all sites must call it together.

        Args:
            transport: the transport.
            shares: share of each site, by rank, with which the means of these buffers are taken now; None for later.
        """
        every = checked(transport.gather_present(self.changed()), list[str], "list of buffers", transport)
        own = dense_buffers(self._model)
        names = {name for changed in every.values() for name in changed} & own.keys()
        new = [own[name] for name in sorted(names)]
        self.names = sorted({*self.names, *names})
        if shares is not None:
            average_tensors(new, transport, shares)
            self.keep()

    def average(self, transport: Transport, shares: Mapping[int, float]) -> None:
        """Replace the known buffers by what the sites agree on, see `agreed_value`.

        Args:
            transport: the transport.
            shares: share in the mean of each site, by rank.
        """
        found = self.known()
        if found and transport.world_size > 1:
            average_tensors(found, transport, shares)
        self.keep()

    def known(self) -> list[Tensor]:
        """Return the known buffers, in the order of their names."""
        return [buffer for name, buffer in sorted(dense_buffers(self._model).items()) if name in self.names]

    def keep(self) -> None:
        """Take the present values of the known buffers as the agreed ones."""
        self.agreed.update(
            {name: each.detach().clone() for name, each in dense_buffers(self._model).items() if name in self.names}
        )

    @torch.no_grad()
    def restore(self, names: Iterable[str] | None = None) -> None:
        """Set the buffers to their values at the last agreement.

        Args:
            names: names of the buffers; None for all.
        """
        wanted = self.agreed if names is None else {*names}
        for name, buffer in dense_buffers(self._model).items():
            if name in wanted and name in self.agreed and self.agreed[name].shape == buffer.shape:
                write(buffer, self.agreed[name])
