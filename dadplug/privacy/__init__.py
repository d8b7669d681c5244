"""Differential privacy of each site's records: per-sample clipping from factors, noise, and the accounting of epsilon.

`DifferentialPrivacy` says how, `PrivateGradients` makes a site's gradients private before anything is sent, and
`PoissonLoader` draws the batches that the accounting assumes. What is compressed and kept afterwards is a function of
private numbers, which costs no privacy. Accounting and masks may be changed here without reading another room.
"""

from __future__ import annotations

from .mechanism import DifferentialPrivacy, Ledger, PoissonLoader

__all__ = ["DifferentialPrivacy", "Ledger", "PoissonLoader"]
