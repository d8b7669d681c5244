from .tools.tuning import *  # noqa: F403
