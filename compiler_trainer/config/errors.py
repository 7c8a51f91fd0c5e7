"""The one exception that bad input raises."""


class UserError(Exception):
    """Input that cannot be honoured: `where` names the field, file or node, `message` the values and the fix."""

    def __init__(self, where: str, message: str):
        super().__init__(f"{where}: {message}")
        self.where, self.message = where, message
