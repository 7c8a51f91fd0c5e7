"""`python -m tools.bench`."""

from tools.bench.command import main

main()
