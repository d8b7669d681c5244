"""A hub that lies: it replaces payloads that it passes on by a pickle, which runs a program where it is unpickled."""

import pickle
from pathlib import Path

from dadplug.hub.server.session import Session
