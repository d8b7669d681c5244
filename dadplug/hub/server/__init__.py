"""The hub's process: may be changed without the sites; decisions are made in `membership`, without I/O."""
