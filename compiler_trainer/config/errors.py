"""The errors that end a command with one line instead of a traceback."""

STOPPED = 3  # exit code of a run that was stopped early, by a signal or a time limit, and saved


class UserError(Exception):
    """An error in the user's input: `place` names the option, file or node; `message` the values and the fix."""

    def __init__(self, place: str, message: str):
        super().__init__(f"{place}: {message}")
        self.place, self.message = place, message


class RunError(Exception):
    """A run that could not finish, on all ranks alike; the message gives the reason and the fix."""
