"""The one exception a user is meant to read."""


class FeatherError(Exception):
    """A mistake the user can mend: says what is wrong, where, and what to do, in one line."""
