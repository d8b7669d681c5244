"""TLS, sockets and sealing: may be changed alone as long as `SecureSocket`, `Sealer` and `Opener` keep methods."""
