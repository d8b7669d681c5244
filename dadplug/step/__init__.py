"""One synchronous step: from the gradients that backward delivers to the agreed ones in ``.grad``.

A method, a path or a form may be changed here without reading the transports (`exchange`) or the layers (`hooks`).
"""
