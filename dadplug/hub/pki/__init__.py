"""Keys, certificates, kits and policies: nothing here depends on connections or training, and may be changed alone."""
