"""`AdaDataLoader`: a loader that reads batches ahead and signals intent for their rows."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .model import AdaModel

Ids = Mapping[str, Tensor]
_POLL = 0.1  # seconds between checks whether the reading thread has to stop


class AdaDataLoader:
    """Loader that reads another loader ahead in a thread, and signals intent for the rows of each batch.

    Batches are yielded unchanged and in order. Each yielded batch advances the clock, in place of each step of the
    optimizer, so that gradient accumulation works. Other attributes (``sampler``, ``batch_sampler``, ``dataset``) are
    those of the wrapped loader.

    Args:
        loader: iterable of batches that can be iterated repeatedly.
        model: the model.
        intent: function from a batch to ids by the names in ``model.managed``; ``"auto"`` to find them by a forward
            pass on shapes.
        forward: for ``"auto"``, a function that calls a model with a batch as the training step does; None to pass the
            batch, or its first element if it is a tuple or list.
        lookahead: number of batches to read ahead.

    Raises:
        ValueError: if an option is out of range.
        IntentError: while iterating, if ids cannot be known before the forward pass.

    Example:
        >>> import torch
        >>> from dadplug.adapm import AdaDataLoader, AdaModel
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Flatten(), torch.nn.Linear(24, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = AdaModel(model, optimizer)
        >>> for ids in AdaDataLoader(torch.randint(100, (5, 4, 3)), model, lookahead=2):
        ...     optimizer.zero_grad()
        ...     model(ids).square().mean().backward()
        ...     model.synchronize()
        ...     optimizer.step()
        >>> model.manager.current_clock
        5
        >>> model.manager.close()
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
        """Return the ids that a batch will look up, by the name of the weight.

        Args:
            batch: a batch of the loader.

        Raises:
            IntentError: if they cannot be known before the forward pass.
        """
        if callable(self._intent):
            return self._intent(batch)
        return self.model.record(self._forward, batch)

    def announce(self, batch: Any, clock: int, number: int) -> None:
        """Signal intent for the rows of a batch; called in the reading thread.

        Args:
            batch: the batch.
            clock: clock at which it will be used.
            number: number of the batch since the start of the iteration, from 0.
        """
        self.model.intent(self.ids(batch), clock)

    def __iter__(self) -> Iterator[Any]:
        manager = self.model.manager
        begin = manager.current_clock + 1  # the clock of the first batch
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
