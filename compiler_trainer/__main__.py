"""`python -m compiler_trainer` is the command `compiler-trainer`."""

from compiler_trainer.command import main

main()
