from .tools.auditing import *  # noqa: F403
