"""What ends a run, and the exit code that the command line gives it."""


class RunError(RuntimeError):
    """Ends a run for a cause that another try may be without; subclasses say when it is another kind of cause."""

    exit_code = 3
    """2: a mistake in the recipe; 3: something that the run depends on; 4: the run has collapsed."""
