"""Named choices of options: `train.yaml` and one folder a group. Defaults live in `compiler_trainer/config.py`."""
