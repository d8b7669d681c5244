"""The part of each way to train that is the same in all trainers: what sites exchange, build, keep and agree on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SiteError
from ..exchange import Traffic, Transport, codec, open_transport
from ..exchange.rounds import Requirements
from ..hogwild import Hogwild
from ..hogwild.training import HogwildOptions
from ..local_steps import LocalOptions, LocalSGD
from ..options import Options
from ..parameter_server import ParameterServer, ServerOptions
from ..parameter_server.server import ServerTransport
from ..reduction import GradientReduction
from ..step.model_sync.private import load_shared_state, shared_state
from ..support.files import PRIVATE, write_file
from ..support.logs import get_logger
from .joining import TrainerState

_log = get_logger(__name__)
States = Sequence[Any]
"""What a checkpoint holds of each site, by rank."""


def plain_states(states: Sequence[Any]) -> list[Any]:
    """Return the states of all sites for a checkpoint, without those that would keep torch from loading the file.

    Args:
        states: the states, by rank; None for absent sites.
    """
    found = [each if codec.is_plain(each) else None for each in states]
    for rank, (before, after) in enumerate(zip(states, found, strict=True)):
        if after is not before:
            _log.warning(
                "the checkpoint has no state of site %d, which has sent objects that torch does not load", rank
            )
    return found


class Exchange:
    """Base of the ways to train; a strategy or runner derives from its way and from the base of its trainer.

    The base of the trainer calls `_build_exchange` when training begins, with the options in `options`. What it builds
    is in `_exchange`, and has the following members, as `dadplug.GradientReduction` does: ``syncing`` and
    ``synchronize()``, called after a backward pass; ``no_sync()`` for accumulation; ``samples(count)``, a context of
    forward passes; ``idle()`` for steps without data; ``state_dict()``, ``load_states(states)``,
    ``gather_objects(item)``, ``abort(reason)``, ``detach(discard=)``; ``stop_fusing(reason)`` and those of
    `dadplug.step.fused.held.HeldGradients` if `_wants_fused` may be set.

    Attributes:
        options: the options of the exchange, an `OptionSet`. They have a ``timeout`` in seconds; ``requirements`` if
            sites may leave and return.
    """

    options: Any
    _exchange: Any = None  # of the last training; None before it
    _elastic: TrainerState | None = None  # of a training in which sites leave and return
    _sends_optimizer = True  # whether a site that joins gets the optimizer's state with that of the trainer
    _returns_by = "min_sites"  # option with which sites leave and return
    _transport: Any  # to the other sites, for everything but gradients
    _process_group: dist.ProcessGroup | None = None
    _steps_in_backward = True  # if not, the way calls `_end_step` after the optimizer's step
    _wants_fused = False  # whether the user asks for steps on gradients that are held, and not formed

    @property
    def _requirements(self) -> Requirements | None:
        """Requirements of training to go on without a site that leaves; None where all must stay."""
        return getattr(self.options, "requirements", None)

    @property
    def _private(self) -> Sequence[str]:
        """Patterns of the names of what stays at this site."""
        return getattr(self.options, "private", ())

    def _open_transport(self, device: torch.device) -> Transport:
        """Open the transport for everything but gradients."""
        return open_transport(
            self._process_group,
            Traffic(),
            device,
            self.options.timeout,
            requirements=self._requirements,
            for_trainer=True,
        )

    def _build_exchange(self, model: torch.nn.Module, scaled: bool) -> Any:
        """Build what the sites exchange in training.

        Args:
            model: the model.
            scaled: whether a GradScaler looks for Inf in gradients.
        """
        raise NotImplementedError

    def _elastic_state(self) -> dict[str, Any] | None:
        """Return the state that a site gets which joins in mid-training; None where all sites have to stay."""
        return None if self._elastic is None else {"trainer": self._elastic}

    def _one_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; raise ValueError unless there is one."""
        raise NotImplementedError

    def _end_step(self) -> None:
        """Count a step of the exchange, where sites may leave and return."""
        raise NotImplementedError

    def _make_equal(self) -> None:
        """Make what may differ between the sites' models equal, before an evaluation or a checkpoint."""

    def own_state(self) -> Any:
        """Return what a checkpoint holds of this site."""
        return self._exchange.state_dict()

    def load_states(self, states: States, rank: int) -> None:
        """Restore this site's state from those of all sites.

        Args:
            states: what `own_state` has returned at each site.
            rank: this site.
        """
        self._exchange.load_states(states)


class SynchronousSteps(Exchange):
    """Gradients that are agreed on in each step, by a `dadplug.GradientReduction`."""

    options: Options

    def _build_exchange(self, model: torch.nn.Module, scaled: bool) -> GradientReduction | None:
        settings = {**vars(self.options), "check_finite": self.options.check_finite and not scaled}
        return self._build_reduction(
            model, {"process_group": self._process_group, "state": self._elastic_state(), **settings}
        )

    def _build_reduction(self, model: torch.nn.Module, settings: dict[str, Any]) -> GradientReduction | None:
        return GradientReduction(model, **settings)

    def _make_equal(self) -> None:
        """Average running statistics."""
        if self.options.average_buffers:
            self._exchange.average_buffers()


class LocalSteps(Exchange):
    """Steps of each site alone, and an agreement on parameters every some steps, by a `dadplug.LocalSGD`."""

    options: LocalOptions
    _steps_in_backward = False

    @property
    def local_options(self) -> LocalOptions:
        """The options of the local steps."""
        return self.options

    def _build_exchange(self, model: torch.nn.Module, scaled: bool) -> LocalSGD:
        self.options = dataclasses.replace(self.options, check_finite=self.options.check_finite and not scaled)
        return LocalSGD(
            model,
            self._one_optimizer(),
            process_group=self._process_group,
            state=self._elastic_state(),
            in_trainer=True,
            **vars(self.options),
        )

    def _make_equal(self) -> None:
        """Agree on one model."""
        self._exchange.finish()

    def own_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this site: its local steps and its optimizer, without private layers."""
        return {"local": self._exchange.state_dict(), "optimizer": shared_state(self._exchange.optimizer)}

    def load_states(self, states: Sequence[Mapping[str, Any] | None], rank: int) -> None:
        """Restore this site's local steps and its optimizer from the states of all sites."""
        super().load_states([state and state["local"] for state in states], rank)
        if (own := _own(states, rank)) is not None:
            load_shared_state(self._exchange.optimizer, own["optimizer"])


class ReturnFile:
    """File with which a killed process of a site returns into a training with a parameter server.

    It exists while a training is under way, and after this site was lost in one.

    Args:
        path: the file; None where no site returns.

    Attributes:
        rank: rank of this site, if this process returns; else None.
        names: names of the sites by rank, if this process returns; else empty.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)
        self._address: str | None = None
        self.rank: int | None = None
        self.names: list[str] = []
        if self._path is not None and self._path.exists():
            try:
                content = json.loads(self._path.read_text())
                self._address, self.names = content["address"], content["sites"]
                self.rank = int(content["address"].rpartition("/")[2])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{self._path} is not a file of return_file=: remove it ({error})") from error

    def open_transport(self, device: torch.device, timeout: float, open_first: Callable[[], Transport]) -> Transport:
        """Open the transport of the trainer.

        Args:
            device: device of the model.
            timeout: seconds that a wait may take.
            open_first: opens that of a training's beginning.
        """
        if self.rank is not None:
            return ServerTransport.of_returning(self.rank, self.names, device, timeout)
        first = open_first()
        return first if self._path is None else ServerTransport(first, device, timeout)

    def build(self, transport: Any, fit: Any, *arguments: Any, **options: Any) -> ParameterServer:
        """Build the parameter server, in whose training this process returns if it does, and write the file.

        Args:
            transport: the transport of the trainer, if there are several sites.
            fit: state of the trainer, for sites that return; None where none does.
            arguments: positional arguments of `ParameterServer`.
            options: other arguments.

        Raises:
            SiteError: if the training cannot be reached; the file is removed then, since it may have ended.
            ValueError: if no site can return, since messages are sealed, or site 0 cannot listen.
        """
        state = None if fit is None else {"trainer": fit}
        try:
            server = ParameterServer(*arguments, state=state, in_trainer=True, rejoin=self._address, **options)
        except SiteError:
            if self.rank is not None:
                self.remove()
            raise
        if self._path is None or transport is None:
            return server
        transport.rounds.server = server
        if transport.world_size == 1:
            return server
        if not server.return_address:
            server.detach()
            raise ValueError(
                "no site can return where messages are sealed, or site 0 cannot listen: leave return_file out"
            )
        names = [transport.sites.name(rank) for rank in range(transport.world_size)]
        content = json.dumps({"address": server.return_address, "sites": names})
        write_file(self._path, content.encode(), PRIVATE)  # the address contains a secret
        return server

    def remove(self) -> None:
        """Remove the file: the training has ended."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class ServerSteps(Exchange):
    """Gradients that are applied in the order of one log, by a `dadplug.ParameterServer`."""

    options: ServerOptions
    _file: ReturnFile
    _sends_optimizer = False
    _returns_by = "return_file"
    _hook: Any = None  # calls `_before_commit`; to be removed when training ends

    @property
    def server_options(self) -> ServerOptions:
        """The options of the server."""
        return self.options

    def _open_transport(self, device: torch.device) -> Transport:
        open_first = super()._open_transport
        return self._file.open_transport(device, self.options.timeout, lambda: open_first(device))

    def _build_exchange(self, model: torch.nn.Module, scaled: bool) -> ParameterServer:
        optimizer = self._one_optimizer()
        self._hook = optimizer.register_step_pre_hook(self._before_commit)
        options = {"process_group": self._process_group, **vars(self.options)}
        return self._file.build(self._transport, self._elastic, model, optimizer, **options)

    def _before_commit(self, optimizer: Any, *_: Any) -> None:
        """Clip the merged gradient of a commit, before the optimizer's step."""
        raise NotImplementedError

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _end_server_step(self) -> None:
        """Require all sites after a step, or count it where sites may leave and return."""
        if self._elastic is None:
            self._exchange.require_all()
        else:
            self._end_step()


class SharedMemorySteps(Exchange):
    """Steps of processes that train one model in shared memory, by a `dadplug.Hogwild`; nothing is exchanged."""

    options: HogwildOptions
    hogwild: Hogwild | None = None
    _optimizers: Any

    def _end_hogwild(self, *reason: str) -> None:
        """End a training that has not ended, after an error; the other processes end, too."""
        if self.hogwild is not None and self.hogwild.running:
            self.hogwild.abort(*reason)

    def own_state(self) -> Any:
        """Return the states of this process's optimizers, if each process has its own."""
        has_own = self.hogwild is not None and self.options.state == "own"
        return [each.state_dict() for each in self._optimizers] if has_own else None

    def load_states(self, states: States, rank: int) -> None:
        """Restore the states of this process's optimizers; all have those of process 0 if there are no others."""
        own = _own(states, rank)
        if isinstance(own, dict) and "optimizer" in own:  # of Lightning's strategy before 0.4, or for local steps
            own = [own["optimizer"]]
        if self.options.state == "own" and isinstance(own, list):
            for optimizer, state in zip(self._optimizers, own, strict=True):
                optimizer.load_state_dict(state)


def _own(states: Sequence[Any], rank: int) -> Any:
    return states[rank] if rank < len(states) else None
