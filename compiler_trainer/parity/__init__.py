"""The check that compiled steps train a model as eager PyTorch on one device does."""
