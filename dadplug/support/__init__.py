"""Parts that every room uses, which use no other room: compilation, registries, options, logs, files, processes.

Each file stands alone, and may be changed without reading another room.
"""
