"""`python -m compiler_trainer` is the command `compiler-trainer`."""

from compiler_trainer.cli.command import main

main()
