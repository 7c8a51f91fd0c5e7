"""The errors that end a command with one line instead of a traceback."""

class UserError(Exception):
    """An error in the user's input: `place` names the option, file or node; `message` the values and the fix."""

    exit_code = 2

    def __init__(self, place: str, message: str):
        super().__init__(f"{place}: {message}")
        self.place, self.message = place, message


class RunError(Exception):
    """A run that could not finish, on all ranks alike or on this one; the message gives the reason and the fix."""

    exit_code = 1
    is_of_all_ranks = True


class RepeatingError(RunError):
    """A RunError that would end the run again, at the same step, if it were started again."""

    exit_code = 2


class Stopped(SystemExit):
    """The end of a run that a signal or a time limit stopped early, and that has saved; `code` is its exit code."""
