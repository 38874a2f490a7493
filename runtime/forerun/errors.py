"""Errors that a user can mend. Each message is one line: what is wrong; what to do."""


class ForerunError(Exception):
    """Base of every error that forerun raises on purpose; the command line prints it as one line."""


class EngineError(ForerunError):
    """An engine directory, or a file in it, that cannot be used as it is."""


class RequestError(ForerunError, ValueError):
    """A prompt or a control that no decoder could honour."""


class ExportError(ForerunError):
    """A source or a recipe that cannot be turned into engines."""


class BackendError(ForerunError):
    """A backend (onnxruntime, a device) that is missing, or that failed while running."""
