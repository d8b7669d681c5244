"""Batch normalisation by the statistics of all sites' rows, forward and backward, on CPU and GPU.

torch.nn.SyncBatchNorm does this on GPUs only, and with every site weighing the same.

From three sites on each site can merge a part of the channels for all others: it gets their statistics of these, and
sends all sites the result. Of a vector of V bytes a site of n then sends 2 (n - 1) / n V in two messages, where each
site sends (n - 1) V in one if it merges all channels itself. Both ways add in the order of ranks, and have the same
bits, so that sites may choose by the time that they have measured. Sums around a shift, for an all-reduce, would lose
bits where a mean is large beside its spread, and an all-reduce takes 2 (n - 1) messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ...exchange import Gather, Transport
from ...exchange.fields import checked
from ...hooks import ForwardOverride, being_exported, eager
from ..planning.merging import gather_seconds
from .samples import SampleCounter

_END, _NO_BATCH, _BATCH = 0, 1, 2  # announcements of a site: the end of its step, or a micro-batch without or with data
_PROBE = 4_096  # elements of the messages by which the link is measured


class RowSums(Protocol):
    """Sums over rows of a layer's inputs and deltas, over the sites that a batch is normalised with."""

    def of_forward(self, values: Tensor) -> Tensor:
        """Merge this vector of mean, sums of squares, number of rows and weight with those of other sites.

        Returns:
            Mean, sums of squares and number of rows, see `merge_statistics`.
        """

    def of_backward(self, values: Tensor, weight: float) -> Tensor:
        """Return the sum of this vector of sums of deltas and those of the same sites, times the sites' weights.

        Args:
            values: the vector.
            weight: weight of this site.
        """


Merge = Callable[[Iterable[Tensor]], Tensor]
"""Function that merges a vector of each site, in the order of ranks."""

add_up: Merge = partial(reduce, torch.add)
"""Returns the sum of vectors."""

_Kind = tuple[int, torch.dtype, Merge]


def merge_statistics(rows: Iterable[Tensor]) -> Tensor:
    """Merge the statistics of sites.

    Args:
        rows: of each site a vector of mean, sums of squares around it, number of rows and weight.

    Returns:
        A vector of mean, sums of squares around it and number of rows.
    """
    matrix = torch.stack([*rows])
    width = matrix.shape[1] // 2 - 1
    means, squares, counts = matrix[:, :width], matrix[:, width:-2], matrix[:, -2:-1]
    count = add_up(counts)
    mean = add_up(means * counts) / count
    return torch.cat([mean, add_up(squares + counts * (means - mean).square()), count])  # Chan et al., no cancellation


def _at_all_sites(transport: Transport, size: int, dtype: torch.dtype, merge: Merge) -> Callable[[Tensor], Tensor]:
    """Prepare an exchange in which every site merges all channels.

    Args:
        transport: the transport.
        size: elements of a vector of a site.
        dtype: their type.
        merge: merges the vectors.

    Returns:
        A function of this site's vector that returns the merged one.
    """
    gather = transport.gather([size] * transport.world_size, dtype)

    def exchange(values: Tensor) -> Tensor:
        gather.payload.copy_(values)
        gather.launch()
        return merge(gather.wait())

    return exchange


def _at_owners(transport: Transport, size: int, dtype: torch.dtype, merge: Merge) -> Callable[[Tensor], Tensor]:
    """Prepare an exchange in which each site merges a part of the channels, as `_at_all_sites` does."""
    further = 2 * (merge is merge_statistics)  # numbers besides the two of each channel; half as many of the result
    widths = [len(part) for part in torch.empty((size - further) // 2).tensor_split(transport.world_size)]
    to_owners = transport.all_to_all([2 * width + further for width in widths], dtype)
    of_owners = transport.gather([2 * width + further // 2 for width in widths], dtype)

    def exchange(values: Tensor) -> Tensor:
        channels, rest = values.split([size - further, further])
        for part, payload in zip(channels.view(2, -1).split(widths, 1), to_owners.payloads, strict=True):
            payload.copy_(torch.cat([part.reshape(-1), rest]))
        to_owners.launch()
        of_owners.payload.copy_(merge(to_owners.wait()))
        of_owners.launch()
        parts = [each.split([2 * width, further // 2]) for each, width in zip(of_owners.wait(), widths, strict=True)]
        return torch.cat([torch.cat([each.view(2, -1) for each, _ in parts], 1).view(-1), parts[0][1]])

    return exchange


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the layers of a model that can be synchronised, by name.

    Raises:
        ValueError: if one has a forward in which `F.batch_norm` cannot be replaced.
    """
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    for name, layer in found.items():
        if "forward" in vars(layer):
            reason = "has a forward that was set on the layer itself; define it in a class"
        elif isinstance(layer, nn.SyncBatchNorm) and type(layer).forward is not nn.SyncBatchNorm.forward:
            reason = "has a forward of its own on top of torch's SyncBatchNorm; derive its class from a BatchNorm"
        else:
            continue
        raise ValueError(
            f"sync_batchnorm=True: layer {name!r} ({type(layer).__name__}) {reason}, or leave the option out"
        )
    return found


class SyncedBatchNorms:
    """Batch normalisations of a model, synchronised with those of the other sites.

    In train mode a layer normalises by mean and variance over all sites' rows, and updates its running statistics by
    them. In eval mode it is unchanged.

    Args:
        model: the model; its layers derived from `nn.BatchNorm1d`, `2d` and `3d` are synchronised, see `batch_norms`.
        transport: a transport that nothing else uses, since its exchanges happen in the middle of forward and backward.
        samples: counter of the samples of a forward pass; None where all sites have the same weight.
        announces: whether sites announce each micro-batch to each other, and the end of a step, so that a site with
            fewer micro-batches takes part in those of the others, see `end_micro_batches`.
    """

    def __init__(
        self, model: nn.Module, transport: Transport, samples: SampleCounter | None, announces: bool = False
    ) -> None:
        self._announces = announces
        self._flags: Gather | None = None
        self._transport = transport
        self._samples = samples
        self._kinds: list[_Kind] = []  # of the exchanges since the last step
        self._last: list[_Kind] = []  # those of the last step: a site without data takes part in them
        self._exchanges: dict[_Kind, Callable[[Tensor], Tensor]] = {}
        self._link: tuple[float, float] | None = None  # once measured: seconds of a message, and for each byte of it
        self._forwards = [SyncedForward(layer, lambda: self, samples) for layer in batch_norms(model).values()]

    def of_forward(self, values: Tensor) -> Tensor:
        return self._exchange(values, merge_statistics)

    def of_backward(self, values: Tensor, weight: float) -> Tensor:
        return self._exchange(values * weight, add_up)

    def _exchange(self, values: Tensor, merge: Merge) -> Tensor:
        """Merge a vector of each site."""
        kind = values.numel(), values.dtype, merge
        if self._announces and not self._kinds:
            self._announce(_BATCH)
        self._kinds.append(kind)
        if kind not in self._exchanges:
            way = _at_owners if self._owners_are_sooner(values.nbytes) else _at_all_sites
            self._exchanges[kind] = way(self._transport, *kind)
        return self._exchanges[kind](values).to(values.device)

    def _owners_are_sooner(self, nbytes: int) -> bool:
        """Return whether a second message takes less time than the bytes that owners save; the same at all sites."""
        transport = self._transport
        if not transport.has_all_to_all or transport.copies <= transport.ring:  # as the hub passes on all that is sent
            return False
        if self._link is None:
            with transport.traffic.apart():
                latency, seconds = gather_seconds(transport, 4), gather_seconds(transport, _PROBE)
                every = transport.gather_present((latency, (seconds - latency) / (4 * _PROBE)))
            times = checked(every, tuple[float, float], "time of an exchange", transport).values()
            self._link = max(each for each, _ in times), max(each for _, each in times)
        latency, by_byte = self._link
        return latency < by_byte * nbytes * (1 - transport.ring / transport.copies)

    def _announce(self, flag: int) -> set[int]:
        """Announce what this site does next; return what all sites do."""
        if self._flags is None:
            self._flags = self._transport.gather([1] * self._transport.world_size, torch.int64)
        self._flags.payload.fill_(flag)
        self._flags.launch()
        return {int(each) for each in self._flags.wait()}

    def idle_micro_batch(self) -> None:
        """Take part in one micro-batch of the other sites, if any has one, without data."""
        if self._forwards and _BATCH in self._announce(_NO_BATCH):
            self._take_part()

    def end_micro_batches(self) -> None:
        """End this site's step: take part in further micro-batches of the others, until none has any."""
        if not self._forwards:
            return
        self.end_step()
        while (flags := self._announce(_END)) != {_END}:
            if _BATCH in flags:
                self._take_part()

    def _take_part(self) -> None:
        self._announces = False  # this has been done
        try:
            self.idle()
        finally:
            self._announces = True
            self.end_step()

    def idle(self, first: bool = True) -> None:
        """Take part in the exchanges of a step without data, which are assumed to be those of the last step.

        Args:
            first: whether there may have been no step yet.

        Raises:
            RuntimeError: if there has been none.
        """
        if first and not self._last and self._forwards:
            raise RuntimeError("with sync_batchnorm a site cannot be idle in the first step: give it a batch there")
        for size, dtype, merge in self._last:
            self._exchange(torch.zeros(size, dtype=dtype), merge)

    @property
    def has_exchanged(self) -> bool:
        """Whether there has been an exchange since the last step."""
        return bool(self._kinds)

    def end_step(self) -> None:
        """Remember the step's exchanges, for `idle`."""
        if self._kinds:
            self._last, self._kinds = self._kinds, []

    def close(self) -> None:
        """Close the connections to the other sites."""
        self._transport.close()

    def detach(self) -> None:
        """Restore the forward of the layers."""
        for forward in self._forwards:
            forward.restore()


class SyncedForward(ForwardOverride):
    """The forward of a synchronised layer: its own, in which `F.batch_norm` takes the statistics of all sites' rows.

    Args:
        layer: the layer.
        sums: called for each batch; returns the sums over rows that it is normalised with.
        samples: counter of the samples of a forward pass; None where all sites have the same weight.
    """

    module: _BatchNorm

    def __init__(self, layer: _BatchNorm, sums: Callable[[], RowSums], samples: SampleCounter | None) -> None:
        super().__init__(layer)
        self._sums = sums
        self._samples = samples

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.module
        if not layer.training or being_exported():
            return self.plain(*args, **kwargs)
        own = type(layer).forward
        forward = _BatchNorm.forward if own is nn.SyncBatchNorm.forward else own  # torch's would synchronise, too
        self._trains, before = False, [each._version for each in layer.buffers(recurse=False)]
        with _Replaced(self._batch_norm) as replaced:
            outputs = forward(layer, *args, **kwargs)
        changed = before != [each._version for each in layer.buffers(recurse=False)]
        if not self._trains and (changed or not replaced.called):  # else its statistics are frozen
            raise ValueError(
                f"sync_batchnorm=True: the forward of {type(layer).__name__} takes statistics without F.batch_norm and "
                "super().forward(), so that only this site's rows would count: change it, or leave the option out"
            )
        return outputs

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Compute what `F.batch_norm` does, in train mode by the statistics of all sites' rows."""
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        self._trains, sums = True, self._sums()
        mean, var, count, site_weight = self._statistics(input.detach(), sums)
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        normalised = _normalise(input, mean, torch.rsqrt(var + eps), count, site_weight, sums)
        shape = [1, -1] + [1] * (input.dim() - 2)
        if weight is None:  # not the tensor that backward needs, which the model might change in place
            return normalised.clone() if bias is None else (normalised + bias.view(shape)).to(input.dtype)
        scale = weight.view(shape)
        scaled = normalised * scale if bias is None else torch.addcmul(bias.view(shape), normalised, scale)
        return scaled.to(input.dtype)

    @torch.no_grad()
    def _statistics(self, inputs: Tensor, sums: RowSums) -> tuple[Tensor, Tensor, float, float]:
        """Return mean, biased variance and number of rows over all sites, and the weight of this site."""
        wide = inputs if inputs.dtype == torch.float64 else inputs.float()
        rows = inputs.numel() // inputs.shape[1]
        if rows:
            var, mean = torch.var_mean(wide, _all_but_channels(inputs), correction=0)
        else:
            var, mean = wide.new_zeros(2, inputs.shape[1])
        weight = 1.0 if self._samples is None else self._samples.weight_of_pass(inputs.shape[0])
        merged = sums.of_forward(torch.cat([mean, var * rows, mean.new_tensor([rows, weight])]))
        count = float(merged[-1])
        if count <= 1:
            raise ValueError(f"expected more than one value per channel when training, over all sites got {count:g}")
        mean, spread = merged[:-1].view(2, -1)
        return mean, spread / count, count, weight


class _Replaced(TorchFunctionMode):
    """Block in which `F.batch_norm` is another function.

    Args:
        function: the function.

    Attributes:
        called: whether it has been called.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = function
        self.called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.called = True
        return self._function(*args, **(kwargs or {}))


class _Normalise(torch.autograd.Function):
    """``(x - mean) * invstd`` where mean and invstd depend on all sites' rows.

    The loss that all sites minimise is ``sum w_s L_s / sum w_s``, while autograd at site s carries the gradient of
    L_s alone, and the reduction multiplies it by ``w_s / sum w``. So the sums of the deltas over all sites are taken
    with the weights, and divided by this site's own.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, mean: Tensor, invstd: Tensor, count: float, weight: float, sums: RowSums
    ) -> Tensor:
        shape = [1, -1] + [1] * (inputs.dim() - 2)
        normalised = ((inputs - mean.view(shape)) * invstd.view(shape)).to(inputs.dtype)
        ctx.save_for_backward(normalised, invstd)
        ctx.count, ctx.weight, ctx.sums = count, weight, sums
        return normalised

    @staticmethod
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        normalised, invstd = ctx.saved_tensors
        sums: RowSums = ctx.sums
        dims = _all_but_channels(deltas)
        shape = [1, -1] + [1] * (deltas.dim() - 2)
        wide = deltas.to(invstd.dtype)
        own = torch.cat([wide.sum(dims), (wide * normalised).sum(dims)])
        means = sums.of_backward(own, ctx.weight) / (ctx.weight * ctx.count)
        mean_deltas, mean_products = means.view(2, -1)
        gradient = (wide - mean_deltas.view(shape) - normalised * mean_products.view(shape)) * invstd.view(shape)
        return gradient.to(deltas.dtype), None, None, None, None, None


_normalise: Callable[..., Tensor] = _Normalise.apply


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]
