"""A site's side of the hub: its link, rounds, transports and tunnel; the hub sees only the messages of `wire`."""
