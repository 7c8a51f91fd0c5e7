"""`python -m compiler_trainer.train` is the same command, under the name that scripts for torchrun may have."""

from compiler_trainer.cli.command import main

if __name__ == "__main__":
    main()
