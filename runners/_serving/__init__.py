"""HTTP face of `dadplug.serving`: requests, the server on LitServe, the client, the status page."""
