"""The one error that a user of the local cluster sees."""


class DevClusterError(Exception):
    """A step can't go on. The message is one sentence: what is missing or wrong, and what to do about it."""
