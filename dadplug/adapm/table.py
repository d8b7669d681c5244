"""A table of the parameter manager: values of one width by key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import kernels
from .engine import Engine
from .initialisers import Constant, Initialiser
from .pending import Pending
from .sampling import Sampler
from .store import Store

if TYPE_CHECKING:
    from .manager import ParameterManager


class Table:
    """Values of one width by key, spread over the sites; made by `ParameterManager.table`.

    Keys are int64 CPU tensors of any shape, values float32 ones with one dimension more. A key may occur several times
    in one call. Calls that find all keys here return at once; others wait for the sites that have them.

    Attributes:
        name: for messages.
        width: number of values a key.
        rows: keys are smaller; None for any.
        rank: this site.
        world_size: number of sites; key k begins at site ``k % world_size``.
    """

    def __init__(
        self,
        manager: ParameterManager,
        engine: Engine,
        number: int,
        name: str,
        width: int,
        rows: int | None,
        initialiser: Initialiser | None,
        capacity: int | None,
        max_rows: int | None = None,
    ) -> None:
        self.name, self.width, self.rows = name, width, rows
        self.rank, self.world_size = manager.rank, manager.world_size
        self._manager, self._engine, self._number = manager, engine, number
        if capacity is None:
            capacity = 1024 if rows is None else -(-rows // engine.sites)
        self._store = Store(width, rows, initialiser or Constant(), capacity, max_rows)
        engine.add_store(self._store)

    def pull(self, keys: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Copies the values of keys.

        Args:
            keys: int64, of any shape.
            out: float32, of shape (keys' shape, width), contiguous; a new tensor where None.

        Returns:
            The values, of shape (keys' shape, width). All that this site has pushed is in them; what others have
            pushed is, up to about one round ago.

        Raises:
            ValueError: if a type or shape does not fit.
            IndexError: if a key is out of range.
            SiteError: if a site ends or does not answer.
        """
        out, done = self._pull(keys, out)
        if done is not None:
            self._manager.wait_for(done)
        return out

    def pull_async(self, keys: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        """Begins a `pull`; ``wait()`` returns the values."""
        out, done = self._pull(keys, out)
        return Pending(self._manager, done, out)

    def _pull(self, keys: Tensor, out: Tensor | None) -> tuple[Tensor, Any]:
        self._manager.check()
        flat = self._flat(keys)
        shape = (*keys.shape, self.width)
        if out is None:
            out = torch.empty(shape)
        elif out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous() or out.is_cuda:
            raise ValueError(
                f"out of table {self.name!r} must be a contiguous float32 CPU tensor of shape {shape}, got {out.dtype} "
                f"of shape {tuple(out.shape)} on {out.device}"
            )
        block = out.detach() if out.requires_grad else out
        request = self._engine.pull(self._number, flat, block.numpy().reshape(-1, self.width))
        if isinstance(request, int):
            self._refuse(flat, request)
        return out, None if request is None else request.done

    def push(self, keys: Tensor, deltas: Tensor) -> None:
        """Adds to the values of keys, wherever they are; this site sees it at once, others about a round later.

        Args:
            keys: int64, of any shape.
            deltas: float32, of shape (keys' shape, width); those of equal keys add up.

        Raises:
            ValueError: if a type or shape does not fit.
            IndexError: if a key is out of range.
            FloatingPointError: if the deltas hold NaN or Inf; nothing has been pushed.
            SiteError: if a site ends or does not answer.
        """
        request = self._push(keys, deltas)
        if request is not None:
            self._manager.wait_for(request.done)

    def push_async(self, keys: Tensor, deltas: Tensor) -> Pending[None]:
        """Begins a `push`; the deltas may change at once, and a later `pull` waits for it by itself."""
        request = self._push(keys, deltas)
        return Pending(self._manager, None if request is None else request.done, None)

    def _push(self, keys: Tensor, deltas: Tensor) -> Any:
        self._manager.check()
        flat = self._flat(keys)
        block = self._block("deltas", keys, deltas)
        if (position := kernels.first_bad_key(flat, self._store.limit)) >= 0:
            self._refuse(flat, position)
        return self._engine.push(self._number, flat, block)

    def set(self, keys: Tensor, values: Tensor) -> None:
        """Sets the values of keys, after what this site has pushed before.

        Other sites that push to the same keys at the same time come before or after, as their owner sees it.

        Args:
            keys: int64, of any shape, distinct.
            values: float32, of shape (keys' shape, width).

        Raises:
            ValueError: if a type or shape does not fit, or a key occurs twice.
            IndexError: if a key is out of range.
            FloatingPointError: if the values hold NaN or Inf.
            SiteError: if a site ends or does not answer.
        """
        self.set_async(keys, values).wait()

    def set_async(self, keys: Tensor, values: Tensor) -> Pending[None]:
        """Begins a `set`, once what this site has pushed before has been delivered."""
        self._manager.check()
        flat = self._flat(keys)
        block = self._block("values", keys, values)
        if (position := kernels.first_bad_key(flat, self._store.limit)) >= 0:
            self._refuse(flat, position)
        if torch.unique(keys).numel() != keys.numel():
            raise ValueError(f"a key occurs twice in a set of table {self.name!r}: which value should it have?")
        while True:
            self._manager.wait_sync()
            begun, request = self._engine.set(self._number, flat, block)
            if begun:
                return Pending(self._manager, None if request is None else request.done, None)

    def intent(self, keys: Tensor, start: int, end: int = 0) -> None:
        """Says that this site will use keys; returns at once.

        Args:
            keys: int64, of any shape.
            start: the clock at which the use begins.
            end: the clock at which it is over, not included; 0 for ``start + 1``.

        Raises:
            ValueError: if a type or shape does not fit, or the end does not come after the start.
            IndexError: if a key is out of range.
        """
        self._manager.check()
        end = end or start + 1
        if end <= start:
            raise ValueError(f"an intent must end after it starts, got start {start} and end {end}")
        flat = self._flat(keys)
        if (position := kernels.first_bad_key(flat, self._store.limit)) >= 0:
            self._refuse(flat, position)
        if end > self._manager.current_clock:
            self._manager.intend(self._number, flat.copy(), start, end)

    def sampler(self, weights: Tensor | None = None, **options: Any) -> Sampler:
        """Makes a sampler of keys, as for negative examples; see `Sampler` for the options."""
        return Sampler(self, weights, **options)

    def here(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Says for each key, in range, whether this site can read it without asking another."""
        return self._engine.here(self._number, keys)

    def owned(self) -> tuple[Tensor, Tensor]:
        """Returns the keys that this site owns at present, ascending, and their values, as copies.

        After `ParameterManager.wait_sync(everywhere=True)`, and while nobody trains, the sites' together are the table.
        Keys that nobody has used are with no site yet.
        """
        keys, values = self._engine.owned(self._number)
        return torch.from_numpy(keys), torch.from_numpy(values)

    def states(self, keys: Tensor) -> Tensor:
        """Says where keys are, as this site sees it, without asking another.

        Args:
            keys: int64, of any shape.

        Returns:
            int8, of the keys' shape: `dadplug.adapm.rows.OWNED`, ``REPLICA`` or ``REQUESTED``, -1 where there is none.
        """
        out = torch.empty(keys.shape, dtype=torch.int8)
        with self._engine._lock:
            rows = self._store.rows
            kernels.states_of(rows.finder, rows.states, self._flat(keys), out.numpy().reshape(-1))
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this site has reserved for the table."""
        return self._store.nbytes

    def _flat(self, keys: Tensor) -> Any:
        if keys.dtype != torch.int64 or keys.is_cuda:
            raise ValueError(
                f"keys of table {self.name!r} must be int64 on the CPU, got {keys.dtype} on {keys.device}: "
                "use keys.long().cpu()"
            )
        flat = keys.numpy()
        return flat if flat.ndim == 1 and flat.flags.c_contiguous else np.ascontiguousarray(flat).reshape(-1)

    def _block(self, name: str, keys: Tensor, values: Tensor) -> Any:
        if values.dtype != torch.float32 or values.is_cuda:
            raise ValueError(
                f"{name} of table {self.name!r} must be float32 on the CPU, got {values.dtype} on {values.device}: "
                f"use {name}.float().cpu()"
            )
        if values.shape != (*keys.shape, self.width):
            raise ValueError(
                f"{name} of table {self.name!r} must be of shape {(*keys.shape, self.width)}, a row for each key, got "
                f"{tuple(values.shape)}"
            )
        block = values.detach().contiguous().numpy().reshape(-1, self.width)
        if (row := kernels.first_not_finite(block)) >= 0:
            key = int(keys.reshape(-1)[row])
            raise FloatingPointError(f"the {name} of key {key} (position {row}) of table {self.name!r} hold NaN or Inf")
        return block

    def _refuse(self, flat: Any, position: int) -> NoReturn:
        most = "" if self.rows is None else f" to {self.rows - 1}"
        raise IndexError(
            f"key {int(flat[position])} (position {position}) is out of range: table {self.name!r} has keys 0{most}"
        )
