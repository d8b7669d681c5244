"""The hub's process: sockets in `hub` and `acceptor`, decisions without input or output in `membership` and `relay`."""
