"""Training and predicting with PyTorch: capture, the executor, models, data, measuring."""
