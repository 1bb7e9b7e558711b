"""`pg-tensile bench`: one model's training step with several memory policies, measured side by side, no server needed.

options.py parses what to run (without torch, so that wrong flags are rejected at once), workload.py builds the model,
its loss and its data, contenders.py runs a step in eager PyTorch or as a program, measured.py interleaves the
contenders in rounds, simulated.py executes nothing, report.py makes the table and the JSON rows, run.py starts it all.
"""
