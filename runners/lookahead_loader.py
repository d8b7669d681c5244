"""Loader that trainers wrap around a train loader, to announce intents and to check them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..adapm import AdaDataLoader, AdaModel, IntentError
from ..adapm.model import Ids
from ..adapm.recorder import count_missing


class LookaheadLoader(AdaDataLoader):
    """`AdaDataLoader` of a trainer's batches.

    If automatic intent cannot find a batch's ids, the loader warns once, and rows are pulled when they are used.

    Args:
        loader: train loader.
        model: managed model.
        intent: as for `AdaDataLoader`.
        lookahead: as for `AdaDataLoader`.
        owner: name of the user's runner or strategy, for messages.
        step: name of the function that looks up ids, for messages.
    """

    def __init__(
        self,
        loader: Any,
        model: AdaModel,
        intent: str | Callable[[Any], Ids],
        lookahead: int,
        *,
        owner: str,
        step: str,
    ) -> None:
        super().__init__(loader, model, intent=intent, forward=self._step, lookahead=lookahead)
        self._owner, self._looks_up = owner, step
        self._held = 0
        self._number = 0
        self._announced: dict[int, Ids] = {}
        self._warned = False

    def _step(self, model: Any, batch: Any) -> None:
        """Call a copy of the model as the trainer calls the model."""
        raise NotImplementedError

    def announce(self, batch: Any, clock: int, number: int) -> None:
        self._number = number
        try:
            ids = self.ids(batch)
        except IntentError as error:
            if callable(self._intent):
                raise
            text = str(error).replace("Give AdaDataLoader intent=", f"Give {self._owner} intent=")
            self._warn(f"{text}. Until then rows are pulled when they are used, which is right, and slower")
            return
        self._announced[clock] = ids
        self.model.intent(ids, clock, clock + 1 + self._held)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Check in a context whether the lookups of a training step have been announced; warn once if not."""
        weights = self.model.managed.values()
        for weight in weights:
            weight.recorded = []
        try:
            yield
            self._compare()
        finally:
            for weight in weights:
                weight.recorded = None

    def _compare(self) -> None:
        clock = self.model.manager.current_clock
        now = [self._announced[at] for at in range(clock - self._held, clock + 1) if at in self._announced]
        for old in [at for at in self._announced if at < clock - self._held]:
            del self._announced[old]
        if self._warned or not now:
            return
        for name, weight in self.model.managed.items():
            parts = [ids[name].reshape(-1).long().cpu() for ids in now if name in ids]
            announced = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
            for keys in weight.recorded or ():
                if missed := count_missing(keys, announced):
                    whose = "the function intent" if callable(self._intent) else "automatic intent"
                    self._warn(
                        f"{whose} has not seen {missed} of {keys.numel()} rows of {name} that {self._looks_up} looked "
                        "up. They were pulled when they were used, which is right, and slower. Give "
                        f"{self._owner} intent=, a function from a batch to all its ids by weight"
                    )
                    return

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, stacklevel=2)
