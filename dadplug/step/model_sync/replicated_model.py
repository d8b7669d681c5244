"""A model with a replica at every site of a process group, and the exchanges that keep the replicas equal."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import DadplugError, DamagedError, DroppedError, MismatchError
from ...exchange import Traffic, Transport, open_transport
from ...exchange.codec import register
from ...exchange.fields import NUMBER, fits
from ...exchange.restrictions import OBJECTS, declared
from ...exchange.rounds import Contribution, Requirements
from ...options import Options
from ...support.logs import get_logger
from ..methods import check_allowed
from ..methods.base import warm_up
from . import buffers, sameness
from .private import SharedPart, further_entries, load_joined_state, shared_part, shared_state
from .structure import ATTACHED, check_elastic, check_model, collection, without_managed

_log = get_logger(__name__)
_OWN = ("timeout", "hub_timeout")  # options that may differ between sites
_OF_CONNECTIONS = ("onnection", "imed out")  # in what torch.distributed says of one that has failed


class Stateful(Protocol):
    """Object with state, such as an optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore what `state_dict` returned."""


@register
@dataclass(frozen=True)
class JoinState:
    """State of a site at the beginning of a step.

    Attributes:
        description: options, and types and shapes of the model's tensors, which have to be the same.
        tensors: parameters and buffers by name.
        step: number of the step.
        plan: state of the plan.
        further: state of the objects that the program has named, such as the optimizer, by name.
        noise: state of the estimates of the gradient's noise; None where there are none.
        frozen: digests by name of parameters that are not sent, since all sites have had them from the start.
    """

    description: dict[str, str]
    tensors: dict[str, Tensor]
    step: int
    plan: Any
    further: dict[str, Any]
    noise: dict[str, Any] | None = None
    frozen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the types, as the state may come from another site.

        Raises:
            ValueError: if one is not valid.
        """
        if not (fits(self, JoinState) and 0 <= self.step <= NUMBER):
            raise ValueError("the state of a training has fields of wrong types, or a number of a step out of range")


def load_joined(name: str, load: Callable[[Any], object], state: Any) -> None:
    """Load a part of the state of another site.

    Args:
        name: what it is of.
        load: function that loads it.
        state: the part.

    Raises:
        MismatchError: if it cannot be loaded; other errors of dadplug as they are.
    """
    try:
        load(state)
    except DadplugError:
        raise
    except Exception as error:
        raise MismatchError(
            f"another site has sent a state of {name!r} that cannot be loaded here: {error!r}"
        ) from error


@contextmanager
def named(rank: int) -> Iterator[None]:
    """Name the site whose state is loaded inside a ``with`` block, in the error of one that cannot be loaded."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DadplugError) and not isinstance(error, DamagedError):
            raise
        raise DamagedError(
            f"the state of site {rank} in the checkpoint cannot be loaded ({error!r}): take another checkpoint"
        ) from error


def check_finite(state: Any) -> None:
    """Raise ValueError if a tensor in nested containers has NaN or Inf, or a number is NaN."""
    if isinstance(state, float) and math.isnan(state):
        raise ValueError("a number is NaN")
    if isinstance(state, Tensor) and not state.isfinite().all():
        raise ValueError(f"a tensor of shape {tuple(state.shape)} has NaN or Inf")
    for each in state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ():
        check_finite(each)


class ReplicatedModel:
    """A model with a replica at every site; the base of `dadplug.GradientReduction`.

    All sites get rank 0's parameters and buffers, but for those that the option ``private`` names.

    Args:
        model: the model, on its device, the same on all sites but for the values of its parameters.
        process_group: the processes that are the sites; the default group where None.
        options: the options, the same on all sites but for the timeout.

    Attributes:
        model: the model.
        shared: the part of it without what the option ``private`` names; the model itself where it names nothing.
        options: the options.
        traffic: the meter of bytes sent and of time spent waiting.
        site_rank: number of this site, from 0.
        world_size: number of sites.

    Raises:
        ValueError: if a parameter has no shape yet, if the model is captured already, if ``sync_batchnorm`` cannot
            synchronise a layer, or ``private`` does not fit the model.
        PolicyError: if the kit by which this site is connected to a hub does not allow an option.
        MismatchError: if models or options differ between sites.
        SiteError: if a site is gone or does not answer.
    """

    _is_attached = False

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None, options: Options) -> None:
        self._check_allowed(options)  # before anything is sent
        check_model(model)
        self.shared = shared_part(model, options.private)
        if options.sync_batchnorm:
            from .batchnorm import batch_norms

            batch_norms(self.shared)  # raises where one cannot be synchronised
        if options.min_sites is not None:
            check_elastic(model)
        self.model = model
        self.options = options
        self.traffic = Traffic()
        self._transport = self._open_transport(process_group)
        self.site_rank, self.world_size = self._transport.rank, self._transport.world_size
        self._by_samples = options.weighting == "samples"
        self._epoch_samples = self._all_samples = 0  # since buffers were averaged; in all, where they are counted
        self._further: dict[str, Stateful] = {}
        self._frozen: dict[str, int] = {}  # digests of parameters that a site which joins has to have
        if self._transport.rounds.joins:
            warm_up(options, next((parameter.dtype for parameter in model.parameters()), torch.float32))
        self._joined: JoinState | None = self._receive_state()
        if self._joined is None:
            if (inside := self._transport.inside) is not None:
                sameness.check_alike(self._describe(), inside)
                sameness.broadcast_model(self.shared, inside)
            sameness.check_alike(self._describe(), self._transport)
            self._make_equal()

    def _receive_state(self) -> JoinState | None:
        """Receive the state of another site, where this one joins in mid-training, and load its model."""
        if not self._transport.rounds.joins:
            return None
        description = self._describe()  # which loads kernels: before the others wait for this site
        state: JoinState | None = self._transport.rounds.receive_state(sameness.largest_state(self.shared))
        if state is not None:
            if not isinstance(state, JoinState):
                raise MismatchError(f"another site has sent an object of type {type(state).__name__} as its state")
            others, own = "the other sites", self._transport.sites[self.site_rank]
            sameness.compare(state.description, description, others, own)
            sameness.load_tensors(sameness.tensors_of(self.shared), state.tensors, frozen=state.frozen)
            self._frozen = state.frozen
            for name, parameter in self.shared.named_parameters():  # the others would end, too, and blame this site
                if parameter.requires_grad and not parameter.isfinite().all():
                    raise MismatchError(f"another site has sent a state in which {name!r} has NaN or Inf")
            self.world_size = self._transport.world_size  # which may have grown meanwhile
        return state

    def _check_allowed(self, options: Options) -> None:
        """Raise PolicyError if the kit by which this site is connected to a hub does not allow the options."""
        check_allowed(options)

    def _make_equal(self) -> None:
        """Replace the parameters and buffers at the start by those of rank 0."""
        self._frozen = sameness.broadcast_model(self.shared, self._transport)

    def _open_transport(self, process_group: dist.ProcessGroup | None) -> Transport:
        """Open a transport of its own over a process group."""
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        options = self.options
        transport = open_transport(
            process_group, self.traffic, device, options.timeout, options.hierarchy, self._requirements
        )
        if transport.inside is not None and sameness.tables_with_max_norm(self.shared):
            transport.close()
            raise ValueError(
                "embeddings with max_norm and min_sites go with one process at each site: start one, or leave max_norm "
                "out"
            )
        if options.hub_timeout is not None:
            transport.rounds.wait_for_hub(options.hub_timeout)
        return transport

    @property
    def _requirements(self) -> Requirements | None:
        """Requirements of training to go on without a site that leaves; None where all must stay."""
        return self.options.requirements

    @property
    def present_sites(self) -> list[int]:
        """Ranks of the sites that took part in the last step; all of them, unless ``min_sites`` lets sites leave."""
        return [rank for rank in range(self.world_size) if rank not in self._transport.rounds.absent]

    @property
    def behind(self) -> bool:
        """Whether the others have ended this step already, so that this site's data do not count in it.

        It happens with ``late="skip"``, and to a site that has joined while the others have trained on. Call `idle` in
        place of forward and backward to catch up faster.
        """
        return self._transport.rounds.behind

    def _join(self, joined: JoinState) -> None:
        """Restore the objects that the program has named from the state of another site, and take part."""
        if joined.further.keys() != self._further.keys():
            here, there = sorted(self._further), sorted(joined.further)
            raise MismatchError(f"state= names {here}, and at the other sites {there}")
        for name, value in joined.further.items():
            load_joined(name, partial(load_joined_state, self._further[name]), value)
        self._joined = None
        if not self._transport.rounds.take_part():
            newer = self._receive_state()
            assert newer is not None
            self._adopt(newer)

    def _adopt(self, joined: JoinState) -> None:
        """Go on from the state of another site, and end with `_join`."""
        raise NotImplementedError

    def _stateful(self, state: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
        """Return the objects that the program has named, whose state a site needs to join.

        Raises:
            ValueError: if the state of one would contain private tensors.
        """
        for name, each in (state or {}).items() if self.options.private else ():
            if isinstance(getattr(each, "optimizer", each), (nn.Module, torch.optim.LBFGS)):
                raise ValueError(
                    f"private: the state of {name!r} ({type(each).__name__}) would be sent with what it has of private "
                    "layers: leave it out of state="
                )
            if names := further_entries(each):
                raise ValueError(
                    f"private: the state of {name!r} ({type(each).__name__}) has {', '.join(sorted(names))} besides "
                    "what belongs to single parameters, which would be sent: let it have shared parameters alone"
                )
        return dict(state or {})

    def _join_state(self, step: int, plan: Any, tensors: Mapping[str, Tensor] | None = None) -> JoinState:
        """Return the state that a site needs to join, without the frozen parameters that it has already.

        Args:
            step: number of the step.
            plan: state of the plan.
            tensors: tensors of the shared part by name; None for the present ones.
        """
        if isinstance(self.shared, SharedPart):
            self.shared.follow()  # parameters may have been replaced
        present = sameness.frozen_digests(self.shared) if self._frozen else {}
        frozen = {name: digest for name, digest in self._frozen.items() if present.get(name) == digest}
        found = sameness.tensors_of(self.shared) if tensors is None else tensors
        further = {name: shared_state(each) for name, each in self._further.items()}
        sent = {name: each for name, each in found.items() if name not in frozen}
        return JoinState(self._describe(), sent, step, plan, further, frozen=frozen)

    def _describe(self) -> dict[str, str]:
        settings = {name: getattr(self.options, name) for name in Options.names() if name not in _OWN}
        privacy = self.options.privacy
        settings["privacy"] = privacy is not None  # sites may have other numbers of records
        if privacy is not None and privacy.secure_sum:
            shared = privacy.noise_multiplier, privacy.max_grad_norm
            settings["privacy"] = "secure_sum with noise_multiplier={} and max_grad_norm={}".format(*shared)
        return sameness.described(self.options.may_differ) | sameness.describe(self.shared, settings)

    @property
    def sites(self) -> list[str]:
        """Names of the sites, by rank, as messages have them."""
        return [self._transport.sites[rank] for rank in range(self.world_size)]

    def broadcast_model(self) -> None:
        """Replace every site's parameters and buffers by those of rank 0; all sites must call it.

        This happens when the reduction is built. Call it again after adding layers whose first values differ.

        Raises:
            SiteError: if a site is gone or does not answer.
        """
        with self.traffic.apart(), without_managed(self.model):
            sameness.broadcast_model(self.shared, self._transport)

    def broadcast_buffers(self) -> None:
        """Replace every site's buffers by those of rank 0; all sites must call it.

        Raises:
            SiteError: if a site is gone or does not answer.
        """
        with self.traffic.apart():
            sameness.broadcast_buffers(self.shared, self._transport)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this site."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        """Restore what ``state_dict`` of this site returned."""
        raise NotImplementedError

    def _load_whole(self, load: Callable[[Any], object], state: Any) -> None:
        """Load a state by a function, or nothing of it.

        Raises:
            DamagedError: if an entry is missing, of another type or not finite.
        """
        before = self.state_dict()
        try:
            check_finite(state)
            load(state)
        except Exception as error:
            load(before)
            raise DamagedError(
                f"the state of {type(self).__name__} cannot be loaded, and nothing of it has been ({error!r}): take "
                "another checkpoint"
            ) from error

    def _state_after(self, state: Any) -> Any:
        """Return the state of a site that has none of its own, from that of another one."""
        raise NotImplementedError

    def load_states(self, states: Sequence[Any]) -> None:
        """Restore this site's state from those of all sites, as a checkpoint contains them.

        A site that has none in it, since the checkpoint was written by fewer sites, or without this one, goes on at the
        step of the others, and what it keeps from step to step begins anew.

        Args:
            states: the states, by rank; None for sites that were absent.

        Raises:
            ValueError: if the states are of another mode or way to train, or damaged; the message names the site.
        """
        found = [rank for rank, each in enumerate(states) if each is not None]
        if found:
            rank = self.site_rank if self.site_rank in found else found[0]
            with named(rank):
                self.load_state_dict(states[rank] if rank == self.site_rank else self._state_after(states[rank]))

    def _check_state(self, state: Mapping[str, Any], entry: str, value: Any = None) -> None:
        """Raise ValueError if a state to load has another value of an entry, or none at all, as of another class."""
        known = isinstance(state, Mapping) and entry in state
        if not known or value not in (None, state[entry]):
            found = f"{entry} {state[entry]!r}, not {value!r}" if known else "another way to train"
            raise ValueError(
                f"the state is of {found}. To go on from the weights alone, load the states of model and optimizer, "
                f"and leave out that of {type(self).__name__}"
            )

    def _count(self, samples: int) -> None:
        """Count samples of a step."""
        self._epoch_samples += samples
        self._all_samples += samples

    def report(self, loss: float | None = None) -> None:
        """Report to a hub what this site has contributed, for the hub's status and the end of its journal.

        It states numbers of this process: samples (of a `GradientReduction`, as far as they are known), steps, and the
        time in which it has waited for others in them. Each site may call it at any time, such as after each epoch.
        The hub and all sites can read these numbers, also where messages are sealed. Without a hub it does nothing.

        Args:
            loss: loss of the site's own validation; None for none.

        Raises:
            TypeError: if the loss is no number.
        """
        if loss is not None and (isinstance(loss, bool) or not isinstance(loss, Real)):
            raise TypeError(f"report(loss=...) takes a number, such as loss.item(), got {type(loss).__name__}")
        own, traffic = None if loss is None else float(loss), self.traffic
        waited = round(1e3 * traffic.wait_in_steps)
        self._transport.rounds.show(Contribution(self._all_samples, traffic.steps, waited, own))

    def average_buffers(self) -> None:
        """Replace running statistics and other buffers by their mean over sites; all sites must call it.

        Single integers, which count something, are set to the maximum; other integers, truth values and floats of 8
        bits to those of the first site that is present. Sparse and quantized buffers stay as they are.

        All sites count the same, or with ``weighting="samples"`` by their samples since the last call. The runners call
        it before evaluation and at checkpoints.

        Raises:
            SiteError: if a site is gone or does not answer.
        """
        weight = float(self._epoch_samples) if self._by_samples else 1.0
        with self.traffic.apart(), suppress(DroppedError):  # this site gets the buffers of another one when it rejoins
            if self._transport.inside is not None:
                buffers.average_buffers(self.shared, self._transport.inside, 1.0)
            buffers.average_buffers(self.shared, self._transport, weight)
        self._epoch_samples = 0

    def first_difference(self) -> str | None:
        """Compare the sites' parameters bit by bit; all sites must call it.

        Returns:
            The name of the first parameter that differs; None if the replicas are equal.

        Raises:
            SiteError: if a site is gone or does not answer.
        """
        with self.traffic.apart(), without_managed(self.model):
            inside = self._transport.inside
            found = None if inside is None else sameness.first_difference(self.shared, inside)
            return sameness.first_difference(self.shared, self._transport) or found

    def gather_objects(
        self,
        item: Any,
        kind: Any = Any,
        what: str = "object",
        counts: Callable[[Any], Iterable[float]] = lambda _: (),
    ) -> list[Any]:
        """Gather an object from every site, by rank; all sites must call it.

        Args:
            item: plain data, tensors, arrays, or registered classes, see `dadplug.exchange.codec.encode`. Tensors come
                back on the CPU.
            kind: type that the objects of all sites must have, such as ``float`` or ``dict[str, Tensor]``.
            what: what an object is, for the error about another one.
            counts: returns the numbers in an object that may be neither negative nor NaN, such as weights.

        Raises:
            MismatchError: if the object of a site is not such a one; where sites may leave, this site is left out.
            PolicyError: if the object is larger than this site's kit allows.
            TypeError: on all sites, if the object of one cannot be sent.
            SiteError: if a site is gone or does not answer.

        Example:
            >>> accuracies = reduction.gather_objects(accuracy)
            >>> mean = sum(accuracies) / len(accuracies)
        """
        with self.traffic.apart(), declared(OBJECTS):
            return self._transport.gather_objects(item, kind, what, counts)

    def _attach(self) -> None:
        """Begin to be what exchanges this model's gradients or parameters; the constructors end with it."""
        self._is_attached = True
        ATTACHED[id(self)] = self
        self.traffic.start()

    def detach(self) -> None:
        """Remove all hooks from the model. May be called twice."""
        self._is_attached = False
        ATTACHED.pop(id(self), None)

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:  # `sys` may be gone before this object
        if not self._is_attached or is_finalizing():
            return
        if not self.traffic.steps:
            _log.warning("a %s ends before its first step: nothing refers to it. Keep it", type(self).__name__)
        with collection():
            self.detach()  # the transports close when they are collected

    @contextmanager
    def naming_sites(self) -> Iterator[None]:
        """Convert errors of torch.distributed's own connections in a context into errors that name the site."""
        try:
            yield
        except RuntimeError as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            raiser = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
            if not raiser.startswith("torch.distributed") or not any(word in str(error) for word in _OF_CONNECTIONS):
                raise
            raise self._transport.lost(error) from error

    def abort(self, reason: str) -> None:
        """Report to the other sites why this one exits, and close the connections to them, so that none of them waits.

        Args:
            reason: the reason, which the errors of the other sites contain.
        """
        self._transport.sites.announce(reason)
        self._transport.close()
