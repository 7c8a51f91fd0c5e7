"""`python -m compiler_trainer.train`: the same command under a name that suits torchrun scripts."""

from compiler_trainer.cli.command import main

if __name__ == "__main__":
    main()
