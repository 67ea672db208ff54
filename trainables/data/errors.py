"""What a reader of data raises."""


class DataError(ValueError):
    """Data that cannot be used; the message names the file, and the line or field where there is one."""
