from .tools.comparison import *  # noqa: F403
