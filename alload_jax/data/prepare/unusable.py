"""The reason why an input file cannot be used."""


class UnusableError(ValueError):
    """A file cannot be used; the message is the reason, which the report lists."""


def short(error: BaseException) -> str:
    """The first line of an error, for a reason; without the path, which the report gives."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]
