"""Frames, control messages and streams, the same at sites and hub: a change here changes the protocol, see `frames.VERSION`."""
