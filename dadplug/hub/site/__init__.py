"""A site's end of the hub: may be changed without the hub's process, which sees only the messages of `wire`."""
