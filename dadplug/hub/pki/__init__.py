"""Keys, certificates, kits and policies of a project; nothing here knows of connections or training, and may be changed alone."""
