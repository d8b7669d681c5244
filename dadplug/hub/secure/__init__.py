"""TLS, sockets and sealing: bytes that arrive as they were sent; the rest of the hub sees `SecureSocket`, `Sealer` and `Opener`."""
