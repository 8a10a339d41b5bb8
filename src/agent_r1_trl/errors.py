"""Errors that end a run, with an exit code, or a request in OpenAI's form, with a status."""


class RunError(RuntimeError):
    """Ends a run for a cause that another try may be without; subclasses say when it is another kind of cause."""

    exit_code = 3
    """2: a mistake in the recipe; 3: something that the run depends on; 4: the run has collapsed."""


class APIError(Exception):
    """An answer other than 200: HTTP's status, what is wrong, the setting, and OpenAI's name of the mistake."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
