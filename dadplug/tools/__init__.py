"""Programs on top of everything else: comparison, tuning, audits and the command line.

No other room imports them, so that they may be changed without reading another room.
"""
