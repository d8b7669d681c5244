"""Keys, certificates, kits, policies and proxies: nothing here depends on the protocol, and may be changed alone."""
