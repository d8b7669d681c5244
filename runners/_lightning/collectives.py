"""Collectives of the strategy: over all sites, or over those that are present where sites leave and return."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...exchange import Transport
from . import present_sites

if TYPE_CHECKING:
    from .ddp_interface import DDPInterface as _DDPStrategy
else:
    _DDPStrategy = object  # DDPStrategy comes behind it, in the classes for a package


class SiteCollectives(_DDPStrategy):
    """Part of `SiteStrategy` with the collectives that Lightning calls."""

    _transport: Transport | None

    @property
    def _elastic_transport(self) -> Transport | None:
        """The transport where sites may leave and return."""
        return self._transport if self._transport is not None and self._transport.elastic else None

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all sites; after an error return at once, since the other sites may have exited."""
        if self._interrupted:
            return
        if self._transport is not None:
            self._transport.gather_objects(None)
        else:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one site's object on all sites; that of the first one where site 0 may have left."""
        if self._elastic_transport is not None and not self._interrupted:
            return present_sites.broadcast(self._elastic_transport, obj, src)
        if self._transport is None or self._interrupted:
            return super().broadcast(obj, src) if self._transport is None else obj
        items = [obj]
        with self._naming_sites():
            dist.broadcast_object_list(items, src, group=self._transport.group)
        return items[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the sites; over those that are present where some may have left."""
        if self._elastic_transport is not None and isinstance(tensor, Tensor):
            return present_sites.reduce(self._elastic_transport, tensor, reduce_op)
        with self._naming_sites():
            return super().reduce(tensor, self._own_group(group), reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all sites decide so, or any of them."""
        if self._elastic_transport is None:
            return super().reduce_boolean_decision(decision, all)
        votes = present_sites.gather(self._elastic_transport, bool(decision))
        return False not in votes if all else True in votes

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all sites, or from those that are present where some may have left."""
        if self._elastic_transport is not None:
            return present_sites.all_gather(self._elastic_transport, tensor, sync_grads)
        with self._naming_sites():
            return super().all_gather(tensor, self._own_group(group), sync_grads)

    def _own_group(self, group: Any) -> Any:
        """Replace the group of all processes by one that this site can leave after an error."""
        everyone = group is None or group is dist.group.WORLD
        return group if self._transport is None or not everyone else self._transport.group

    def _share_sigterm(self) -> None:
        """Stop all sites if the first has got SIGTERM, as Lightning does before each batch.

        Lightning asks through the group of all processes, in which sites would wait for one that has failed. Where
        sites may leave, the one that has got the signal does, and the others go on.
        """
        if self._elastic_transport is not None:
            if self._trainer.received_sigterm:
                raise self._sigterm()
            return
        received = torch.tensor([int(self._trainer.received_sigterm)], device=self.root_device)
        with self._naming_sites():
            dist.broadcast(received, 0, group=self._own_group(None))
        if received.item():
            self.barrier()
            raise self._sigterm()

    def _sigterm(self) -> BaseException:
        error: BaseException = sys.modules[type(self._trainer.fit_loop.epoch_loop).__module__].SIGTERMException()
        return error

    @contextmanager
    def _naming_sites(self) -> Iterator[None]:
        """Convert connection errors in a context into errors that name the site."""
        try:
            yield
        except RuntimeError as error:
            if self._transport is None or not any(word in str(error) for word in ("onnection", "imed out")):
                raise
            raise self._transport.lost(error) from error

    @property
    def _trainer(self) -> Any:
        return getattr(self.lightning_module, "_trainer", None)

    @property
    def _interrupted(self) -> bool:
        return self._trainer is not None and self._trainer.interrupted

    @property
    def _in_fit(self) -> bool:
        """Whether all sites are inside a fit, so that they can communicate."""
        trainer = self._trainer
        return trainer is not None and trainer.state.fn == "fit" and not self._interrupted
