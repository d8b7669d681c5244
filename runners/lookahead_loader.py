"""The loader that trainers put around a train loader: intents, and a look at whether they were right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..adapm import AdaDataLoader, AdaModel, IntentError
from ..adapm.loader import Ids
from ..adapm.recorder import count_missing


class LookaheadLoader(AdaDataLoader):
    """An `AdaDataLoader` of a trainer's batches.

    Where automatic intent cannot see a batch's ids, it says so once, and rows are pulled when they are used.

    Args:
        loader: the train loader.
        model: the managed model.
        intent: as for `AdaDataLoader`.
        lookahead: as for `AdaDataLoader`.
        owner: what the user has asked for it, for messages.
        step: what looks up, for messages.
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
        self._told: dict[int, Ids] = {}
        self._warned = False

    def _step(self, model: Any, batch: Any) -> None:
        """Calls a copy of the model as the trainer calls the model."""
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
        self._told[clock] = ids
        self.model.intent(ids, clock, clock + 1 + self._held)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look whether what the training step inside looks up was announced; say so once where it was not."""
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
        now = [self._told[at] for at in range(clock - self._held, clock + 1) if at in self._told]
        for old in [at for at in self._told if at < clock - self._held]:
            del self._told[old]
        if self._warned or not now:
            return
        for name, weight in self.model.managed.items():
            told = [ids[name].reshape(-1).long().cpu() for ids in now if name in ids]
            announced = torch.cat(told) if told else torch.empty(0, dtype=torch.long)
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
