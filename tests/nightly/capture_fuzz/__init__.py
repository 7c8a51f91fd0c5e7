"""Random models that switch autograd and autocast on and off, captured and compared with eager PyTorch."""
