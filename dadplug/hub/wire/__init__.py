"""Frames, control messages and streams of both ends: a change here changes the protocol, see `messages.VERSION`."""
