"""Guard against steps of optimizers by which the sites' replicas would differ."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...errors import MismatchError
from ...support.logs import get_logger
from ..units.base import Unit, is_zero
from .private import is_private
from .sameness import OptimizerSettings
from .structure import OptimizerHook, attached, call_before_update, is_managed, weak_hook

_log = get_logger(__name__)
_APPLIED = "_dadplug_applied"  # attribute of a gradient that an optimizer has applied: its version then
_UNSTEPPED = 2  # agreements after which an optimizer should have stepped the model


class StepGuard:
    """Guard of a model whose gradients the sites agree on: an optimizer may step only on what they have agreed on.

    Args:
        reduction: the `dadplug.GradientReduction`, or a proxy of it.
        settings: records the settings of the model's optimizers.

    Attributes:
        agreements: number of agreements so far.
    """

    def __init__(self, reduction: Any, settings: OptimizerSettings) -> None:
        self._reduction = reduction
        self._settings = settings
        self.agreements = 0
        self._agreed: Sequence[Unit] = ()  # in the last agreement
        self._applied: set[int] = set()  # identities of the parameters that were stepped since
        # Agreements at the last step of each optimizer; -1 before its first one.
        self._stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._structure: object = None  # of the model, when its parameters were looked up
        self._ours: set[int] = set()  # identities of the parameters
        self._has_warned = False  # of gradients that were changed before they were synchronized
        self._used: int | None = None  # forward passes before the last agreement; None once an optimizer has stepped
        self._last_stepped = 0.0  # agreements when the model was last stepped; inf once it was warned that it is not
        self._hooks = [
            OptimizerHook(register_optimizer_step_pre_hook(weak_hook(self._before_step))),
            OptimizerHook(register_optimizer_step_post_hook(weak_hook(self._after_step))),
        ]

    def remove(self) -> None:
        """Remove the hooks. May be called twice."""
        for hook in self._hooks:
            hook.remove()

    def record_agreement(self, units: Sequence[Unit], forwards: int) -> None:
        """Record that the sites have agreed on the gradients of some units, after a number of forward passes."""
        self.agreements += 1
        self._agreed, self._used = units, forwards
        self._applied.clear()

    def warn_of_changes(self, units: Sequence[Unit], step: int) -> None:
        """Warn, once, if the program has changed gradients in place between backward and `synchronize`.

        Args:
            units: the units of the step.
            step: its number.
        """
        if self._reduction.world_size == 1 or self._has_warned:
            return
        if (name := next((unit.name for unit in units if unit.changed), None)) is not None:
            self._has_warned = True
            _log.warning(
                "step %d: the gradient of %r was changed between backward() and synchronize(), as by clipping or "
                "unscaling: each site changes only its own. Clip and unscale after synchronize()",
                step,
                name,
            )

    def check_used(self, forwards: int | None) -> None:
        """Raise MismatchError if a site is about to replace agreed gradients by those of a step without its own.

        They stand in ``.grad``, and since they were agreed on the site has not run the model, stepped or cleared.

        Args:
            forwards: number of forward passes so far; None not to check.
        """
        if forwards is None or forwards != self._used:
            return
        gradients = (each.grad for unit in self._agreed for each in unit.parameters.values())
        if not all(is_zero(each) for each in gradients if each is not None):
            own = self._reduction.sites[self._reduction.site_rank]
            raise MismatchError(
                f"{own}: a second synchronize() after one backward(), which would replace gradients that are agreed "
                "already. Call it once for each step of the optimizer, not beside apply(); a step without data is "
                "reduction.idle()"
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Record the settings of an optimizer of the model; called before the step of any optimizer.

        Returns:
            The arguments of the step, if its closure is to be checked, too.

        Raises:
            RuntimeError: if gradients have not been synchronized; with a closure, once that has formed them.
        """
        self._used = None
        structure = self._reduction.present_structure
        if structure is None or structure is not self._structure:
            self._structure, self._ours = structure, {id(each) for each in self._reduction.shared.parameters()}
        stepped = [each for group in optimizer.param_groups for each in group["params"] if id(each) in self._ours]
        if not stepped:
            self._warn_of_copy(optimizer)
            return None
        self._settings.record(optimizer)
        if optimizer not in self._stepped:
            self._stepped[optimizer] = -1
            if self._reduction.world_size > 1:
                self._warn_of_own_decisions(optimizer)
        begun = self.agreements
        return call_before_update(args, kwargs, lambda: self._check_agreed(optimizer, stepped, begun))

    def _check_agreed(self, optimizer: Optimizer, stepped: Sequence[nn.Parameter], begun: int) -> None:
        """Raise RuntimeError if an optimizer is about to apply gradients of this site alone.

        They have arrived here, or they have not: as those of parameters that have taken the place of others have not.
        What a closure has agreed on since the step has begun may be held, to be applied after it.
        """
        stale: Sequence[nn.Parameter] = stepped if self._stepped[optimizer] == self.agreements else ()
        if self._stepped[optimizer] < 0:  # what is agreed on may be stepped by several optimizers, each with a part
            agreed = {id(each) for unit in self._agreed for each in unit.parameters.values()} - self._applied
            stale = [each for each in stepped if id(each) not in agreed]
        gradients = (each.grad for each in stale if each.grad is not None and not is_managed(each))
        gradients = (each for each in gradients if getattr(each, _APPLIED, None) != each._version)
        held = self._reduction.holds and self.agreements > begun
        own = self._reduction.world_size > 1 and not all(map(is_zero, gradients))
        if own or (self._reduction.pending and not held):
            raise RuntimeError(
                "optimizer.step() before gradients were synchronized: call reduction.synchronize() after backward(), "
                "also in a closure. With DistributedDataParallel: call the wrapped model, not its module, and outside "
                "of no_sync(). If this site is to train alone from now on: reduction.detach()"
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record which gradients an optimizer has applied; called after the step of any optimizer."""
        if optimizer in self._stepped and self._reduction.world_size > 1:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            self._applied.update(map(id, parameters))
            for parameter in parameters:
                if (gradient := parameter.grad) is not None:  # unchanged, it may be applied again
                    setattr(gradient, _APPLIED, gradient._version)
        if optimizer in self._stepped:
            self._stepped[optimizer] = self._last_stepped = self.agreements

    def _warn_of_copy(self, optimizer: Optimizer) -> None:
        """Warn, once, of an optimizer with parameters like the model's, while none steps those."""
        if self.agreements - self._last_stepped < _UNSTEPPED:
            return
        ours = Counter(each.shape for each in self._reduction.shared.parameters())
        if Counter(each.shape for group in optimizer.param_groups for each in group["params"]) <= ours:
            self._last_stepped = math.inf
            _log.warning(
                "the optimizer %s holds none of the parameters whose gradients are synchronized, and these have not "
                "been stepped: it holds those of a copy, or of before they were replaced, as by "
                "load_state_dict(assign=True). Build it from the parameters of the model that is trained",
                type(optimizer).__name__,
            )

    def _warn_of_own_decisions(self, optimizer: Optimizer) -> None:
        """Warn of steps that differ between sites: of parameters outside of the model, and by this site's own loss.

        Raises:
            ValueError: for LBFGS with private parameters beside others.
        """
        ours = {id(each) for other in attached() for each in other.model.parameters()}
        stepped = [each for group in optimizer.param_groups for each in group["params"]]
        if isinstance(optimizer, LBFGS) and any(map(is_private, stepped)):
            raise ValueError(
                "LBFGS makes one step of all gradients, and those of private layers differ between sites: give these "
                "an optimizer of their own"
            )
        others = (each for each in stepped if id(each) not in ours and not is_managed(each))
        further = next((each for each in others if each.grad is not None), None)
        if further is not None:
            _log.warning(
                "the optimizer %s steps a parameter of shape %s that is outside of the model: its gradient is this "
                "site's own, and its values will differ between sites. Put it into the model, or wrap its module, too",
                type(optimizer).__name__,
                [*further.shape],
            )
        if optimizer.param_groups[0].get("line_search_fn"):
            _log.warning(
                "the line search of %s compares losses: let the closure return the mean over the sites, such as "
                "torch.distributed.all_reduce of the loss gives, since sites that decide by their own loss go apart",
                type(optimizer).__name__,
            )
