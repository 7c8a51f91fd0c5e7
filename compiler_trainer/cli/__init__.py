"""The command line: options train a model, verbs do everything else."""
