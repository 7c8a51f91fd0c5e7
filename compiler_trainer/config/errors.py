"""What ends a command with one line instead of a traceback."""

STOPPED = 3  # exit code of a run that was stopped early, by a signal or a time limit, and saved


class UserError(Exception):
    """Input that cannot be honoured: `where` names the field, file or node, `message` the values and the fix."""

    def __init__(self, where: str, message: str):
        super().__init__(f"{where}: {message}")
        self.where, self.message = where, message


class RunError(Exception):
    """A run that could not come to its end, on all ranks alike; the message says why and what to do."""
