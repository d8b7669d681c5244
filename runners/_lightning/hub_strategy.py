"""Base of the Lightning strategies whose sites may leave and return over a hub."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ...files import replacing
from .strategy import SiteStrategy


class HubStrategy(SiteStrategy):
    """Lightning strategy whose sites may leave and return over a hub, where the option ``min_sites`` says so.

    Args:
        kind: as in `SiteStrategy`; the options have ``min_sites`` and ``requirements``.
        keywords: as in `SiteStrategy`.

    Raises:
        ValueError: if there is no hub with ``min_sites``.
    """

    def __init__(self, kind: type[Any], keywords: Mapping[str, Any]) -> None:
        super().__init__(kind, keywords)
        if self.options.min_sites is not None and self.cluster_environment is None:
            raise ValueError(
                "min_sites needs a hub, which tracks the sites that are present: dadplug.connect(kit=...) before the "
                "strategy is built"
            )

    @property
    def is_global_zero(self) -> bool:
        """Whether this site prints and logs: site 0, or the first one that is present where sites may leave."""
        transport = self._elastic_transport
        return bool(self.global_rank == (0 if transport is None else transport.lowest))

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with the compressor state of every site."""
        if self._elastic is None:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        else:  # each site writes its own files, since any of them may leave
            self._add_states(checkpoint)
            self._write_whole(checkpoint, filepath, storage_options)

    def _write_whole(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Write a file, or replace it as a whole: sites of one machine may share it, and write it at the same time."""
        local = type(self.checkpoint_io).__name__ == "TorchCheckpointIO" and "://" not in str(filepath)
        target = f"{filepath}.{self.global_rank}.part" if local else filepath
        with replacing(Path(filepath), Path(target), durable=False) if local else nullcontext():
            self.checkpoint_io.save_checkpoint(checkpoint, target, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._elastic is None:
            super().remove_checkpoint(filepath)
        else:
            with suppress(FileNotFoundError):  # sites of one machine may share the file
                self.checkpoint_io.remove_checkpoint(filepath)
