"""Training and prediction with PyTorch: capture, the executor, models, data and measurements."""
