"""The errors a user can meet. All are `CompressionError`; the narrower ones say whose input was wrong."""


class CompressionError(RuntimeError):
    """Something about compressed training went wrong, on this rank or on a peer; the message names the input and the way out."""


class PayloadError(CompressionError):
    """Bytes from a peer are truncated, foreign, of another step, or do not decode."""


class MismatchError(CompressionError):
    """The ranks do not agree on the method, its options, the tensors or the version."""
