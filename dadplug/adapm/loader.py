"""`AdaDataLoader`: any loader, read ahead so that rows are here before their batch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .model import AdaModel

Ids = Mapping[str, Tensor]
_POLL = 0.1  # seconds between looks at whether the reader is to stop


class AdaDataLoader:
    """Reads a loader ahead in a thread, and says which rows of an `AdaModel` each batch will look up.

    Batches come out unchanged and in order. The clock moves on with each batch that is handed out, instead of with each
    step of the optimizer, so that accumulation over batches works too. Attributes that it does not have (``sampler``,
    ``batch_sampler``, ``dataset``) are the loader's.

    Args:
        loader: any iterable of batches that can be iterated again.
        model: the model.
        intent: a function from a batch to ids by the names in ``model.managed``; ``"auto"`` finds them from a forward
            pass on shapes.
        forward: for ``"auto"``: calls a model with a batch as the training step does; where None, with the batch, or
            with its first part if it is a tuple or list.
        lookahead: number of batches to be ahead.

    Raises:
        ValueError: if an option is out of range.

    Example:
        >>> for inputs, targets in AdaDataLoader(loader, model):
        ...     criterion(model(inputs), targets).backward()
    """

    def __init__(
        self,
        loader: Any,
        model: AdaModel,
        *,
        intent: str | Callable[[Any], Ids] = "auto",
        forward: Callable[[Any, Any], Any] | None = None,
        lookahead: int = 16,
    ) -> None:
        if lookahead < 1:
            raise ValueError(f"lookahead must be at least 1, got {lookahead}")
        if intent != "auto" and not callable(intent):
            raise ValueError(f"intent must be 'auto' or a function from a batch to its ids, got {intent!r}")
        self.loader = loader
        self.model = model
        self.lookahead = lookahead
        self._forward = forward if forward is not None else _call
        self._intent = intent
        model.clock_by_loader = True

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def ids(self, batch: Any) -> Ids:
        """Returns the ids that a batch will look up, by weight.

        Raises:
            IntentError: if they cannot be known before the forward pass.
        """
        if callable(self._intent):
            return self._intent(batch)
        return self.model.record(self._forward, batch)

    def announce(self, batch: Any, clock: int, number: int) -> None:
        """Says which rows a batch will look up; called in the reading thread.

        Args:
            batch: the batch.
            clock: the clock at which it will be used.
            number: number of the batch since the loader began, from 0.
        """
        self.model.intent(self.ids(batch), clock)

    def __iter__(self) -> Iterator[Any]:
        manager = self.model.manager
        begin = manager.current_clock + 1  # the first batch moves the clock there
        ready: queue.Queue[tuple[str, Any]] = queue.Queue(self.lookahead)
        stop = threading.Event()

        def put(item: tuple[str, Any]) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=_POLL)
                    return True
                except queue.Full:
                    continue
            return False

        def read() -> None:
            try:
                for number, batch in enumerate(self.loader):
                    self.announce(batch, begin + number, number)
                    if not put(("batch", batch)):
                        return
                put(("end", None))
            except BaseException as error:
                put(("error", error))

        thread = threading.Thread(target=read, name="dadplug-ahead", daemon=True)
        thread.start()
        try:
            while True:
                kind, item = ready.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise item
                manager.advance_clock()
                yield item
        finally:
            stop.set()
            thread.join()


def _call(model: Any, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)
