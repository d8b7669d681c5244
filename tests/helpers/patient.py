"""Predictors for tests: their goals and deadlines are far, so that a busy machine changes no result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dadplug.serving import Predictor


def patient_predictor(models: Mapping[str, Any], **options: Any) -> Predictor:
    """Return a predictor whose requests have a minute."""
    return Predictor(models, **{"slo": 60.0, "deadline": 60.0, "reload": False, **options})
