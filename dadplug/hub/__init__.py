"""The hub that sites of different institutions dial: kits, local policies, encrypted connections."""
