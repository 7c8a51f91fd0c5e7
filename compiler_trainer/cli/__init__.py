"""The command line: options train a model, a verb does something else."""
