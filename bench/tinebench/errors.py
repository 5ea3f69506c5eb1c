"""The one way to say that a figure cannot be taken on this machine."""


class NotHere(Exception):
    """A figure cannot be taken here; the text is the reason, for the person who asked."""
