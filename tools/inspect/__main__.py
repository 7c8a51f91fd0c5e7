"""`python -m tools.inspect`."""

from tools.inspect.command import main

main()
