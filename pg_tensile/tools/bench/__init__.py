"""`pg-tensile bench`: one model's training step with several memory policies, measured side by side, no server needed.

options.py says what to run (no torch, so that wrong flags are answered at once), workload.py builds the model, its loss
and its data, contenders.py runs a step by eager PyTorch or by a program, run.py interleaves them in rounds, report.py
makes the table and the JSON rows.
"""
