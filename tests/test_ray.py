"""`dadplug.ray` where Ray is not installed; tests/trainers/test_ray.py tests it with Ray."""

from __future__ import annotations

import sys

import pytest

import dadplug.ray


def test_without_ray_the_error_names_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'dadplug\[ray,lightning\]'"):
        from dadplug.ray import RayDADStrategy  # noqa: F401
    assert not hasattr(dadplug.ray, "RayDDPStrategy")
