"""The tests of trainers need both of them."""

import importlib.util

collect_ignore_glob = [] if all(map(importlib.util.find_spec, ("catalyst", "pytorch_lightning"))) else ["test_*.py"]
