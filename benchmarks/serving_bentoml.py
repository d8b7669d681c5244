"""The model of `serving.py` behind BentoML's adaptive batching; `serving.py --bentoml PYTHON` starts it."""

from __future__ import annotations

import os
from pathlib import Path

import bentoml
import numpy as np
import torch
from serving import SLO, Served


@bentoml.service(workers=1, traffic={"timeout": 60})
class Adaptive:
    """One worker, as the other servers have."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = Served().eval()
        weights = Path(os.environ["SERVING_FOLDER"]) / "weights.pt"
        self.model.load_state_dict(torch.load(weights, weights_only=True))

    @bentoml.api(batchable=True, batch_dim=0, max_batch_size=256, max_latency_ms=int(1000 * SLO))
    def predict(self, input: np.ndarray) -> np.ndarray:
        """Return logits."""
        with torch.inference_mode():
            return self.model(torch.as_tensor(np.asarray(input), dtype=torch.float32)).numpy()
