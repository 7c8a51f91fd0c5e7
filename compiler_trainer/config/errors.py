"""The errors that end a command with one line instead of a traceback."""

STATED: dict[str, str] = {}  # option -> `FILE:LINE` in this command's job file; empty if the command line sets it


class UserError(Exception):
    """An error in the user's input: `place` names the option, file or node; `message` the values and the fix."""

    exit_code = 2

    def __init__(self, place: str, message: str):
        super().__init__(f"{place}: {message}")
        self.place, self.message = place, message


def with_line(error: UserError) -> str:
    """Return an error's text, after the file and line of the option at fault if a job file sets it."""
    place = error.place.partition("[")[0]
    groups = [name for name in STATED if f"{place}.".startswith(f"{name}.")]
    name = max(groups, key=len) if groups else next((name for name in STATED if name.startswith(f"{place}.")), "")
    return f"{STATED[name]}: {error}" if STATED.get(name) else str(error)


def one_line(message: object) -> str:
    """Return a message, or that of an error, on one line."""
    return " ".join(str(message).split())


def first_line(message: object) -> str:
    """Return the first line of a message, or of that of an error."""
    return (str(message).strip() or "no message").splitlines()[0]


class RunError(Exception):
    """A run that could not finish, on all ranks alike or on this one; the message gives the reason and the fix."""

    exit_code = 1
    is_of_all_ranks = True


class RepeatingError(RunError):
    """A RunError that would end the run again, at the same step, if it were started again."""

    exit_code = 2


class Stopped(SystemExit):
    """The end of a run that a signal or a time limit stopped early, and that has saved; `code` is its exit code."""
